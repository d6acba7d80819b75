//! Selection for pooling and its gradients.

mod cudnn;

use crate::assembler::Assembler;
use crate::routine::elem;
use crate::source::SourceKernel;
use crate::source::c_type;
use crate::window::window;
use cudnn::Pool;
use frit_ir::ops::Window;
use frit_ir::plan::{Argument, PoolFunction};
use frit_ir::{DType, Node, Op, TensorType};
use frit_kernels::routine::Routine;
use frit_kernels::routine::pooling::Pooling;

impl SourceKernel {
    /// The structure `Window` of the kernels: image sizes, output positions, taps, strides, dilations and padding.
    pub(super) fn window(
        mut self,
        window: &Window,
        input: &[usize],
        taps: &[usize],
    ) -> Option<Self> {
        let output = window.positions(input, taps).ok()?;
        let all = [input, &output, taps, &window.strides, &window.dilations, &window.low];
        let words = all.iter().flat_map(|list| list.iter().map(|n| *n as i64)).collect();
        self.arguments.push(Argument::Words(words));
        Some(self)
    }
}

pub(super) fn cuda(a: &mut Assembler<'_>, node: &Node) -> Option<()> {
    // The image is the operand, or the result of a gradient.
    let (window, taps, image) = match &node.op {
        Op::MaxPool(op) => (&op.window, &op.taps, a.ty(node.inputs[0])),
        Op::SumPool(op) => (&op.window, &op.taps, a.ty(node.inputs[0])),
        Op::MaxPoolGrad(op) => (&op.window, &op.taps, a.ty(node.outputs[0])),
        Op::SumPoolGrad(op) => (&op.window, &op.taps, a.ty(node.outputs[0])),
        _ => return None,
    };
    let dims = image.shape.dims();
    let (images, size) = (dims[0] * dims[1], &dims[2..]);
    let positions: usize = window.positions(size, taps).ok()?.iter().product();
    let to = a.write(node.outputs[0]);
    let operands: Vec<_> = node.inputs.iter().map(|v| a.read(*v)).collect::<Option<_>>()?;
    if images == 0 {
        return Some(());
    }
    let begin = a.launches();
    let element = c_type(image.dtype)?;
    let kernel =
        |entry| SourceKernel::new("pool", entry).define("T", element).define("RANK", size.len());
    let outputs = |kernel: SourceKernel| kernel.threads(images * positions);
    let inputs = |kernel: SourceKernel| kernel.threads(image.shape.numel());
    let forward = |entry| -> Option<SourceKernel> {
        let kernel = outputs(kernel(entry)).pointer(to).pointer(operands[0]);
        Some(kernel.window(window, size, taps)?.i64(images))
    };
    match &node.op {
        Op::MaxPool(_) => a.run(forward("max_pool")?),
        Op::SumPool(_) => a.run(forward("sum_pool")?),
        Op::MaxPoolGrad(_) => {
            u32::try_from(size.iter().product::<usize>() + 1).ok()?;
            let places = a.scratch(images * positions * DType::I32.size());
            let find = outputs(kernel("max_pool_places")).pointer(places).pointer(operands[1]);
            a.run(find.window(window, size, taps)?.i64(images));
            let sum = inputs(kernel("pool_grad")).pointer(to).pointer(operands[0]).pointer(places);
            a.run(sum.window(window, size, taps)?.i64(images).i64(0));
        }
        _ => {
            let sum = inputs(kernel("pool_grad")).pointer(to).pointer(operands[0]);
            let sum = sum.pointer(operands[0]).window(window, size, taps)?;
            a.run(sum.i64(images).i64(1));
        }
    }
    let pool = Pool { window, taps, image };
    match &node.op {
        Op::MaxPool(_) => pool.candidate(a, PoolFunction::Max, [operands[0], to], begin),
        Op::SumPool(_) => pool.candidate(a, PoolFunction::Sum, [operands[0], to], begin),
        Op::SumPoolGrad(_) => pool.candidate(a, PoolFunction::SumGrad, [to, operands[0]], begin),
        _ => {}
    }
    Some(())
}

pub(super) fn cpu(op: &Op, ins: &[&TensorType], outs: &[&TensorType]) -> Option<Routine> {
    let (sliding, taps, x) = match op {
        Op::MaxPool(op) => (&op.window, &op.taps, ins[0]),
        Op::SumPool(op) => (&op.window, &op.taps, ins[0]),
        Op::MaxPoolGrad(op) => (&op.window, &op.taps, outs[0]),
        Op::SumPoolGrad(op) => (&op.window, &op.taps, outs[0]),
        _ => return None,
    };
    let dims = x.shape.dims();
    let pooling = Pooling {
        elem: elem(x.dtype)?,
        images: dims[0] * dims[1],
        window: window(sliding, &dims[2..], taps)?,
    };
    Some(match op {
        Op::MaxPool(_) => Routine::MaxPool(pooling),
        Op::MaxPoolGrad(_) => Routine::MaxPoolGrad(pooling),
        Op::SumPool(_) => Routine::SumPool(pooling),
        _ => Routine::SumPoolGrad(pooling),
    })
}
