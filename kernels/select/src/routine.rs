//! Selects the CPU routine for a body, and the sources of its operands.

use crate::{
    adafactor, attention, batch_norm, conv, convert, embedding, index, layout, matmul, order, pool,
    quantize, random, reduce,
};
use frit_ir::ops::Input;
use frit_ir::plan::{self, RoutineCall, Source};
use frit_ir::strided::{self, Strided};
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

/// A routine, and the values of a body that it reads and computes, in the order of its operands and results.
pub(super) struct Call {
    pub(super) routine: Routine,
    pub(super) reads: Vec<Access>,
    pub(super) writes: Vec<Access>,
}

/// A value of a body that a routine reads or computes, and how the routine has its elements in memory.
pub(super) enum Access {
    /// An operand or a result of the body.
    Whole(ValueId),
    /// What is, or is a part of, an operand or a result with layout operations between.
    View(ValueId, Strided),
}

impl Access {
    pub(super) fn whole(values: &[ValueId]) -> Vec<Access> {
        values.iter().copied().map(Access::Whole).collect()
    }

    /// The operand in which a routine reads the value, and the byte at which it begins.
    fn read(&self, body: &Graph) -> Option<Place> {
        match self {
            Access::Whole(value) => Some((operand(body, *value)?, 0)),
            Access::View(value, view) => place(body, *value, view, strided::read(body, *value)?),
        }
    }

    /// The same of the result in which it writes the value.
    fn written(&self, body: &Graph) -> Option<Place> {
        match self {
            Access::Whole(value) => Some((result(body, *value)?, 0)),
            Access::View(value, view) => place(body, *value, view, strided::written(body, *value)?),
        }
    }

    fn value(&self) -> ValueId {
        let (Access::Whole(value) | Access::View(value, _)) = self;
        *value
    }
}

/// The position of an operand or result of a body, and a byte of it.
type Place = (usize, usize);

/// Where a value begins that lies as the routine has it.
fn place(body: &Graph, value: ValueId, view: &Strided, lies: Strided) -> Option<Place> {
    (lies == *view).then(|| (view.operand, view.offset * body.ty(value).dtype.size()))
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
fn operand(body: &Graph, value: ValueId) -> Option<usize> {
    inputs(body).iter().position(|v| *v == value)
}

fn inputs(body: &Graph) -> Vec<ValueId> {
    let inputs = body.nodes().map(|(_, n)| n).filter(|n| matches!(n.op, Op::Input(_)));
    inputs.map(|n| n.outputs[0]).collect()
}

/// The position of a value among the results of a body; `None` if it is none of them, or several.
pub(super) fn result(body: &Graph, value: ValueId) -> Option<usize> {
    let mut places = (0..body.outputs.len()).filter(|i| body.outputs[*i].value == value);
    let (Some(place), None) = (places.next(), places.next()) else { return None };
    Some(place)
}

/// The routine of a body; `None` if there is none.
pub(super) fn select(body: &Graph) -> Option<plan::Routine> {
    let n_operands = inputs(body).len();
    // A scatter into a constant has a routine that does not read the constant.
    let placed = index::cpu_scatter(body).and_then(|call| Placed::new(body, call));
    let placed = placed.or_else(|| {
        let body = constants_as_operands(body)?;
        Placed::new(&body, of_operands(&body)?)
    });
    let Placed { routine, reads, writes } = placed?;
    let source = |(i, at): &Place| match i.checked_sub(n_operands) {
        None => Source::Operand(*i, *at),
        Some(constant) => Source::Constant(constant, *at),
    };
    let reads: Vec<Source> = reads.iter().map(source).collect();
    // Without a list, a routine has all operands, or results, of the body in order.
    let all_reads = (0..n_operands).map(|i| Source::Operand(i, 0));
    let reads = (!all_reads.eq(reads.iter().cloned())).then_some(reads);
    let all_writes = (0..body.outputs.len()).map(|i| (i, 0));
    let writes = (!all_writes.eq(writes.iter().copied())).then_some(writes);
    Some(plan::Routine { call: written(&routine), reads, writes })
}

/// A routine that computes a body, and the places of its operands and results.
struct Placed {
    routine: Routine,
    reads: Vec<Place>,
    writes: Vec<Place>,
}

impl Placed {
    /// `None` if the routine does not compute the body. It must read operands of the body, and write every result once, as
    /// the value that the body returns there: selectors look at the operations of a body, and a body may return other
    /// values than these compute, one value twice, or an operand.
    fn new(body: &Graph, call: Call) -> Option<Placed> {
        let Call { routine, reads, writes } = call;
        let numel = |v: ValueId| body.ty(v).shape.numel();
        let mut rest: Vec<usize> = body.outputs.iter().map(|o| numel(o.value)).collect();
        let mut places = Vec::with_capacity(writes.len());
        for access in &writes {
            let place = access.written(body)?;
            // Views of distinct values are distinct parts of a result, so that their sizes show whether they fill it.
            rest[place.0] = rest[place.0].checked_sub(numel(access.value()))?;
            places.push(place);
        }
        let reads = reads.iter().map(|access| access.read(body)).collect::<Option<_>>()?;
        rest.iter().all(|n| *n == 0).then_some(Placed { routine, reads, writes: places })
    }
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
    Some(Call { routine, reads: Access::whole(&node.inputs), writes: Access::whole(&node.outputs) })
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
