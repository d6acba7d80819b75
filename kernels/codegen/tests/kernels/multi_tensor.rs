//! Regions of several shapes in one launch on CUDA: the same bits as one kernel for each.

use crate::cuda::{assembles, shape};
use crate::harness::{Body, normal};
use crate::ptx_machine;
use frit_codegen::{HostTarget, compile_cuda, compile_host, supported, supported_on_cuda};
use frit_ir::ops::{ByParamGroup, Cast, FusionKind, Input, OptimizerKind, OptimizerStep, Slice};
use frit_ir::{DType, Graph, Op, Tensor, ValueId};

/// What all regions read: hyper-parameters and the learning rates of two parameter groups.
struct Shared {
    rates: ValueId,
    scalars: Vec<ValueId>,
}

const KIND: OptimizerKind = OptimizerKind::Adamw;

fn shared(body: &mut Body) -> Shared {
    let rates = body.input(DType::F32, &[2]);
    let scalars = (1..KIND.n_scalars()).map(|_| body.input(DType::F32, &[])).collect();
    Shared { rates, scalars }
}

/// A step of `n` elements, whose learning rate changes at an element that an operand tells, and its result in bf16.
fn step(body: &mut Body, shared: &Shared, n: usize) -> Vec<ValueId> {
    let mut operands: Vec<ValueId> = (0..4).map(|_| body.input(DType::F32, &[n])).collect();
    let begin = body.input(DType::I64, &[1]);
    let mut rate = |i| {
        let slice = Slice { start: vec![i], size: vec![1], step: vec![1] };
        body.one(Op::Slice(slice), &[shared.rates])
    };
    let rates = [rate(0), begin, rate(1)];
    operands.push(body.one(Op::ByParamGroup(ByParamGroup { len: n }), &rates));
    operands.extend(&shared.scalars);
    let mut results = body.all(Op::OptimizerStep(OptimizerStep::of(KIND)), &operands);
    results.push(body.one(Op::Cast(Cast { to: DType::BF16 }), &results[..1]));
    results
}

/// One region for each of these sizes.
fn steps(sizes: &[usize]) -> Graph {
    let mut body = Body::new();
    let shared = shared(&mut body);
    let results: Vec<ValueId> = sizes.iter().flat_map(|n| step(&mut body, &shared, *n)).collect();
    body.done(&results)
}

/// A value for every operand of a body of [`steps`].
fn operands(body: &Graph) -> Vec<Tensor> {
    let inputs = body.nodes().filter_map(|(_, n)| match &n.op {
        Op::Input(Input { ty, .. }) => Some(ty.clone()),
        _ => None,
    });
    let value = |(i, ty): (usize, frit_ir::TensorType)| match ty.dtype {
        DType::I64 => Tensor::ints(DType::I64, ty.shape, vec![7]),
        _ => {
            let x = normal(ty.dtype, ty.shape.dims(), i as u64, 0.2);
            let x = x.as_floats().unwrap().iter().map(|x| x.abs()).collect();
            Tensor::floats(ty.dtype, ty.shape, x)
        }
    };
    inputs.enumerate().map(value).collect()
}

#[test]
fn regions_of_several_shapes_give_the_bits_of_one_kernel_each() {
    for sizes in [vec![2048, 40, 4096, 2048, 40], vec![64], vec![8, 8], vec![3, 1, 3]] {
        let all = steps(&sizes);
        let inputs = operands(&all);
        let module = compile_cuda(&[("all", &all, FusionKind::MultiTensor)], "sm_90").unwrap();
        assert_eq!(module.kernels[0].launches.len(), 1);
        let found = ptx_machine::run(&module, &inputs);
        let n_shared = KIND.n_scalars();
        for (i, n) in sizes.iter().enumerate() {
            let one = steps(&[*n]);
            let own = &inputs[n_shared + 5 * i..][..5];
            let operands = [&inputs[..n_shared], own].concat();
            let region = [("one", &one, FusionKind::Pointwise)];
            let expected = ptx_machine::run(&compile_cuda(&region, "sm_90").unwrap(), &operands);
            for (a, b) in found[4 * i..].iter().zip(&expected) {
                assert_eq!(a.to_bytes(), b.to_bytes(), "region {i} of {sizes:?}");
            }
        }
    }
}

#[test]
fn equal_regions_share_their_code() {
    let kernel = |n: usize| {
        let body = steps(&vec![4096; n]);
        compile_cuda(&[("steps", &body, FusionKind::MultiTensor)], "sm_90").unwrap()
    };
    let (few, many) = (kernel(3), kernel(6));
    let stores = |module: &frit_codegen::CudaModule| module.ptx.matches("st.global").count();
    assert_eq!(stores(&few), stores(&many));
    assert_eq!(shape(&many), [(256, [6 * shape(&few)[0].1[0] / 3, 1])]);
}

#[test]
fn more_pointers_than_registers_hold_are_refused() {
    let refused = supported_on_cuda(&steps(&[64; 30]), FusionKind::MultiTensor).unwrap_err();
    assert!(refused.to_string().contains("too many operands"), "{refused}");
    // A processor runs one region after the other.
    assert!(supported(&steps(&[64, 64]), FusionKind::MultiTensor).is_err());
    let body = steps(&[64]);
    let list = [("steps", &body, FusionKind::MultiTensor)];
    assert!(compile_host(&list, &HostTarget::native()).is_err());
}

#[test]
fn steps_of_several_layers_assemble() {
    let body = steps(&[[786_432, 1536].to_vec(), vec![7_087_872; 4]].concat());
    assembles(&[("steps".into(), body, FusionKind::MultiTensor)]);
}
