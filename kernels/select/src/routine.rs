//! Selects the CPU routine for a body, and the sources of its operands.

use crate::{
    adafactor, attention, batch_norm, conv, convert, embedding, index, layout, matmul, order, pool,
    quantize, random, reduce,
};
use frit_ir::ops::Input;
use frit_ir::plan::{self, RoutineCall, Source};
use frit_ir::{DType, Graph, Node, Op, Origin, Region, TensorType, ValueId};
use frit_kernels::dtype::Elem;
use frit_kernels::routine::Routine;
use std::collections::HashMap;

/// The routine of one operation for operands and results of these types; `None` if there is none, or the operation
/// belongs to another family.
type Cpu = fn(&Op, &[&TensorType], &[&TensorType]) -> Option<Routine>;

/// The families of operations that routines compute one by one.
const FAMILIES: &[Cpu] = &[
    adafactor::cpu,
    batch_norm::cpu,
    conv::cpu,
    convert::cpu,
    embedding::cpu,
    index::cpu,
    layout::cpu,
    order::cpu,
    pool::cpu,
    quantize::cpu,
    random::cpu,
    reduce::cpu,
];

/// A routine, and for each of its operands and results the operand or result of the body and the byte at which it
/// begins.
pub(super) struct Call {
    pub(super) routine: Routine,
    pub(super) reads: Vec<(usize, usize)>,
    pub(super) writes: Vec<(usize, usize)>,
}

/// The element type of the kernel library.
pub(super) fn elem(dtype: DType) -> Option<Elem> {
    match dtype {
        DType::F32 => Some(Elem::F32),
        DType::BF16 => Some(Elem::BF16),
        DType::F16 => Some(Elem::F16),
        _ => None,
    }
}

/// The position of a value among the operands of a body.
pub(super) fn operand(body: &Graph, value: ValueId) -> Option<usize> {
    inputs(body).iter().position(|v| *v == value)
}

fn inputs(body: &Graph) -> Vec<ValueId> {
    let inputs = body.nodes().map(|(_, n)| n).filter(|n| matches!(n.op, Op::Input(_)));
    inputs.map(|n| n.outputs[0]).collect()
}

/// The position of a value among the results of a body.
pub(super) fn result(body: &Graph, value: ValueId) -> Option<usize> {
    body.outputs.iter().position(|o| o.value == value)
}

/// The routine of a body; `None` if there is none.
pub(super) fn select(body: &Graph) -> Option<plan::Routine> {
    let n_operands = inputs(body).len();
    // A scatter into a constant has a routine that does not read the constant.
    let call = index::cpu_scatter(body).or_else(|| of_operands(&constants_as_operands(body)?))?;
    let source = |(i, at): &(usize, usize)| match i.checked_sub(n_operands) {
        None => Source::Operand(*i, *at),
        Some(constant) => Source::Constant(constant, *at),
    };
    let reads: Vec<Source> = call.reads.iter().map(source).collect();
    let in_order = |i: usize, at: &Source| *at == Source::Operand(i, 0);
    let reads = match reads.iter().enumerate().all(|(i, at)| in_order(i, at)) {
        true => None,
        false => Some(reads),
    };
    let in_order = call.writes.iter().enumerate().all(|(i, at)| *at == (i, 0));
    let writes = if in_order { None } else { Some(call.writes) };
    Some(plan::Routine { call: written(&call.routine), reads, writes })
}

/// A routine as it is stored in a plan.
fn written(routine: &Routine) -> RoutineCall {
    let call = serde_json::to_value(routine).and_then(serde_json::from_value);
    call.expect("invariant: a routine has a name and parameters")
}

/// The routine of a body whose operands are all in memory.
fn of_operands(body: &Graph) -> Option<Call> {
    let nodes: Vec<&Node> = body.nodes().map(|(_, n)| n).filter(|n| !n.op.is_leaf()).collect();
    let region = matmul::cpu(body, &nodes)
        .or_else(|| attention::cpu(body))
        .or_else(|| batch_norm::cpu_with_relu(body, &nodes));
    if region.is_some() {
        return region;
    }
    let [node] = nodes[..] else { return None };
    let types = |values: &[ValueId]| values.iter().map(|v| body.ty(*v)).collect::<Vec<_>>();
    let (ins, outs) = (types(&node.inputs), types(&node.outputs));
    let routine = FAMILIES.iter().find_map(|cpu| cpu(&node.op, &ins, &outs))?;
    let first = |at: usize| (at, 0);
    Some(Call {
        routine,
        reads: node.inputs.iter().map(|v| operand(body, *v).map(first)).collect::<Option<_>>()?,
        writes: node.outputs.iter().map(|v| result(body, *v).map(first)).collect::<Option<_>>()?,
    })
}

/// The body with its constants turned into operands behind the existing ones.
fn constants_as_operands(body: &Graph) -> Option<Graph> {
    let is_constant = |n: &&Node| matches!(n.op, Op::Constant(_));
    let constants = body.nodes().map(|(_, n)| n).filter(is_constant).map(|n| n.outputs[0]);
    let (mut all, mut map) = (Graph::new(&body.name), HashMap::new());
    let mut add =
        |op: Op, inputs: &[ValueId]| all.add(op, inputs, Origin::none(), Region::Forward).ok();
    for (i, value) in inputs(body).into_iter().chain(constants).enumerate() {
        let input = Op::Input(Input { name: i.to_string(), ty: body.ty(value).clone() });
        map.insert(value, add(input, &[])?[0]);
    }
    for (_, node) in body.nodes().filter(|(_, n)| !n.op.is_leaf()) {
        let operands: Vec<ValueId> =
            node.inputs.iter().map(|v| map.get(v).copied()).collect::<Option<_>>()?;
        let outputs = add(node.op.clone(), &operands)?;
        map.extend(node.outputs.iter().copied().zip(outputs));
    }
    for output in &body.outputs {
        all.add_output(&output.name, *map.get(&output.value)?, output.kind);
    }
    Some(all)
}
