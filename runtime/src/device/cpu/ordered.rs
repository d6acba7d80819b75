//! Library kernels whose operands are not the task's in order: some are constants of the body, one is
//! taken twice.

use super::library::Routine;
use super::operand::Operand;
use frit_ir::ops::Input;
use frit_ir::{Graph, Node, Op, Origin, Region, TensorType, ValueId};
use frit_kernels::pool::Pool;
use std::collections::HashMap;

/// A routine and where its operands come from.
pub(super) struct Library {
    routine: Routine,
    /// `None` if they are the task's, in order.
    sources: Option<Vec<Source>>,
}

/// Where an operand of a routine comes from.
enum Source {
    /// An operand of the task.
    Read(usize),
    /// A constant: its type and its elements, aligned for every type.
    Constant(TensorType, Vec<u64>),
}

impl Library {
    /// The kernel of a body; `None` if there is none.
    pub(super) fn of(body: &Graph) -> Option<Library> {
        if let Some(routine) = Routine::of(body) {
            return Some(Library { routine, sources: None });
        }
        let (body, sources) = with_operands_in_order(body)?;
        Some(Library { routine: Routine::of(&body)?, sources: Some(sources) })
    }

    /// Runs it on dense operands of the body's types.
    pub(super) fn run(
        &self,
        pool: &Pool,
        reads: &[Operand],
        writes: &[Operand],
    ) -> Result<(), String> {
        let Some(sources) = &self.sources else { return self.routine.run(pool, reads, writes) };
        let operand = |source: &Source| match source {
            Source::Read(i) => Operand { pointer: reads[*i].pointer, ty: reads[*i].ty.clone() },
            Source::Constant(ty, words) => {
                Operand { pointer: words.as_ptr().cast::<u8>().cast_mut(), ty: ty.clone() }
            }
        };
        let operands: Vec<Operand> = sources.iter().map(operand).collect();
        self.routine.run(pool, &operands, writes)
    }
}

/// A body that computes the same of operands in another order: those of its only operation, or, if it has
/// several, the task's and then its constants.
fn with_operands_in_order(body: &Graph) -> Option<(Graph, Vec<Source>)> {
    let nodes: Vec<&Node> = body.nodes().map(|(_, n)| n).filter(|n| !n.op.is_leaf()).collect();
    let leaves = |is: fn(&Op) -> bool| body.nodes().map(|(_, n)| n).filter(move |n| is(&n.op));
    let inputs: Vec<ValueId> =
        leaves(|op| matches!(op, Op::Input(_))).map(|n| n.outputs[0]).collect();
    let constants = leaves(|op| matches!(op, Op::Constant(_))).map(|n| n.outputs[0]);
    let operands: Vec<ValueId> = match nodes[..] {
        [node] => node.inputs.clone(),
        _ => inputs.iter().copied().chain(constants).collect(),
    };
    let mut ordered = Graph::new(&body.name);
    let mut map: HashMap<ValueId, ValueId> = HashMap::new();
    let mut sources = Vec::new();
    let mut made = Vec::new();
    let mut add =
        |op: Op, inputs: &[ValueId]| ordered.add(op, inputs, Origin::none(), Region::Forward).ok();
    for value in operands {
        let ty = body.ty(value).clone();
        let input = Op::Input(Input { name: sources.len().to_string(), ty: ty.clone() });
        made.push(add(input, &[])?[0]);
        map.insert(value, made[sources.len()]);
        sources.push(match &body.def(value).op {
            Op::Constant(constant) => {
                let mut bytes = constant.value.to_bytes();
                bytes.resize(bytes.len().next_multiple_of(8), 0);
                let words = bytes.as_chunks::<8>().0.iter().map(|w| u64::from_ne_bytes(*w));
                Source::Constant(ty, words.collect())
            }
            _ => Source::Read(inputs.iter().position(|v| *v == value)?),
        });
    }
    for node in &nodes {
        let operands: Vec<ValueId> = match nodes.len() {
            1 => made.clone(),
            _ => node.inputs.iter().map(|v| map.get(v).copied()).collect::<Option<_>>()?,
        };
        let outputs = add(node.op.clone(), &operands)?;
        map.extend(node.outputs.iter().copied().zip(outputs));
    }
    for output in &body.outputs {
        ordered.add_output(&output.name, *map.get(&output.value)?, output.kind);
    }
    Some((ordered, sources))
}

#[cfg(test)]
mod tests {
    use super::*;
    use frit_ir::ops::{Concat, Constant as ConstantOp, Embedding};
    use frit_ir::{DType, OutputKind, Tensor};

    #[test]
    fn a_constant_is_read_from_the_kernels_own_memory() {
        let mut body = Graph::new("kernel");
        let mut add = |op: Op, inputs: &[ValueId]| {
            body.add(op, inputs, Origin::none(), Region::Forward).unwrap()[0]
        };
        let ids = Tensor::ints(DType::I64, [3], vec![1, 1, 1]);
        let ids = add(Op::Constant(ConstantOp { value: ids }), &[]);
        let ty = TensorType::new(DType::F32, [2, 2]);
        let table = add(Op::Input(Input { name: "0".into(), ty: ty.clone() }), &[]);
        let rows = add(Op::Embedding(Embedding { padding_idx: None }), &[table, ids]);
        body.add_output("0", rows, OutputKind::Result);
        assert!(Routine::of(&body).is_none());
        let library = Library::of(&body).expect("a kernel");
        let (mut table, mut out) = ([1f32, 2.0, 3.0, 4.0], [0f32; 6]);
        let reads = vec![Operand { pointer: table.as_mut_ptr().cast(), ty }];
        let ty = TensorType::new(DType::F32, [3, 2]);
        let writes = [Operand { pointer: out.as_mut_ptr().cast(), ty }];
        library.run(&Pool::new(1), &reads, &writes).unwrap();
        assert_eq!(out, [3.0, 4.0, 3.0, 4.0, 3.0, 4.0]);
    }

    #[test]
    fn an_operand_may_be_taken_twice() {
        let mut body = Graph::new("kernel");
        let mut add = |op: Op, inputs: &[ValueId]| {
            body.add(op, inputs, Origin::none(), Region::Forward).unwrap()[0]
        };
        let ty = TensorType::new(DType::F32, [2]);
        let x = add(Op::Input(Input { name: "0".into(), ty: ty.clone() }), &[]);
        let both = add(Op::Concat(Concat { axis: 0 }), &[x, x]);
        body.add_output("0", both, OutputKind::Result);
        let library = Library::of(&body).expect("a kernel");
        let (mut x, mut out) = ([1f32, 2.0], [0f32; 4]);
        let reads = [Operand { pointer: x.as_mut_ptr().cast(), ty }];
        let ty = TensorType::new(DType::F32, [4]);
        let writes = [Operand { pointer: out.as_mut_ptr().cast(), ty }];
        library.run(&Pool::new(1), &reads, &writes).unwrap();
        assert_eq!(out, [1.0, 2.0, 1.0, 2.0]);
    }
}
