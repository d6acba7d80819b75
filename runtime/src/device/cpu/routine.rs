//! Calls routines of the kernel library with their operands resolved.

use crate::RunError;
use frit_ir::plan::{self, Kernel, Source, layout};
use frit_ir::{Graph, Op, TensorType};
use frit_kernels::pool::Pool;
use frit_kernels::routine::{Operand, Routine};

/// A prepared routine.
pub(super) struct Ready {
    routine: Routine,
    /// Where its operands come from.
    reads: Vec<Read>,
    /// For each of its results, the result of the task and the first byte within it.
    writes: Vec<(usize, usize)>,
}

/// Where an operand of a routine comes from.
enum Read {
    /// An operand of the task, from this byte on.
    Operand(usize, usize),
    /// A constant, aligned for every type, and its size in bytes.
    Constant(Vec<u64>, usize),
}

impl Ready {
    /// Prepares a kernel's routine.
    ///
    /// # Errors
    /// If the library has no such routine, or an operand is not one of the kernel.
    pub(super) fn of(kernel: &Kernel, named: &plan::Routine) -> Result<Ready, RunError> {
        let refuse = |reason: String| RunError::Plan {
            path: layout::PLAN.into(),
            reason: format!("kernel `{}`: {reason}", kernel.name),
        };
        let routine = serde_json::to_value(&named.call).and_then(serde_json::from_value);
        let routine: Routine = routine.map_err(|e| {
            refuse(format!("routine `{}` does not accept its parameters: {e}", named.call.name))
        })?;
        let body = &kernel.body;
        let operands: Vec<&TensorType> = body
            .nodes()
            .filter(|(_, n)| matches!(n.op, Op::Input(_)))
            .map(|(_, n)| body.ty(n.outputs[0]))
            .collect();
        let results: Vec<&TensorType> = body.outputs.iter().map(|o| body.ty(o.value)).collect();
        let within = |types: &[&TensorType], i: usize, at: usize| {
            types.get(i).is_some_and(|ty| at <= ty.bytes())
        };
        let read = |source: &Source| match *source {
            Source::Operand(i, at) if within(&operands, i, at) => Some(Read::Operand(i, at)),
            Source::Constant(i, 0) => constant(body, i),
            _ => None,
        };
        let reads = match &named.reads {
            None => Some((0..operands.len()).map(|i| Read::Operand(i, 0)).collect()),
            Some(reads) => reads.iter().map(read).collect(),
        };
        let writes = match &named.writes {
            None => (0..results.len()).map(|i| (i, 0)).collect(),
            Some(writes) => writes.clone(),
        };
        match reads {
            Some(reads) if writes.iter().all(|(i, at)| within(&results, *i, *at)) => {
                Ok(Ready { routine, reads, writes })
            }
            _ => Err(refuse("an operand of the routine is not one of the kernel".into())),
        }
    }

    /// Runs the routine.
    ///
    /// # Errors
    /// An index outside its axis.
    ///
    /// # Safety
    /// Operands and results must be dense, with the types of the kernel's body; results must not overlap operands.
    pub(super) unsafe fn run(
        &self,
        pool: &Pool,
        reads: &[Operand],
        writes: &[Operand],
    ) -> Result<(), String> {
        let from = |operand: Operand, at: usize| Operand {
            // The constructor checked that it is within the operand.
            pointer: operand.pointer.wrapping_add(at),
            bytes: operand.bytes - at,
        };
        let read = |read: &Read| match read {
            Read::Operand(i, at) => from(reads[*i], *at),
            Read::Constant(words, bytes) => {
                Operand { pointer: words.as_ptr().cast::<u8>().cast_mut(), bytes: *bytes }
            }
        };
        let reads: Vec<Operand> = self.reads.iter().map(read).collect();
        let writes: Vec<Operand> =
            self.writes.iter().map(|(i, at)| from(writes[*i], *at)).collect();
        // SAFETY: by the contract of this function.
        unsafe { self.routine.run(pool, &reads, &writes) }
    }
}

/// The elements of a body's `i`-th constant.
fn constant(body: &Graph, i: usize) -> Option<Read> {
    let constants = body.nodes().filter_map(|(_, n)| match &n.op {
        Op::Constant(constant) => Some(&constant.value),
        _ => None,
    });
    let mut bytes = constants.into_iter().nth(i)?.to_bytes();
    let len = bytes.len();
    bytes.resize(len.next_multiple_of(8), 0);
    let words = bytes.as_chunks::<8>().0.iter().map(|w| u64::from_ne_bytes(*w));
    Some(Read::Constant(words.collect(), len))
}

#[cfg(test)]
mod tests {
    use super::*;
    use frit_ir::ops::{Concat, Constant as ConstantOp, Embedding, Input};
    use frit_ir::plan::Entry;
    use frit_ir::{DType, Origin, OutputKind, Region, Tensor, ValueId};

    fn run(body: Graph, reads: &mut [f32], writes: &mut [f32]) {
        let routine = frit_select::cpu(&body).expect("a routine");
        let kernel = Kernel::new("kernel".into(), body, Entry::Routine(routine.clone()));
        let ready = Ready::of(&kernel, &routine).expect("ready");
        let operand = |x: &mut [f32]| Operand {
            pointer: x.as_mut_ptr().cast(),
            bytes: std::mem::size_of_val(x),
        };
        // SAFETY: the callers' arrays are of the bodies' types.
        unsafe { ready.run(&Pool::new(1), &[operand(reads)], &[operand(writes)]).unwrap() };
    }

    #[test]
    fn a_constant_is_read_from_the_kernels_own_memory() {
        let mut body = Graph::new("kernel");
        let mut add = |op: Op, inputs: &[ValueId]| {
            body.add(op, inputs, Origin::none(), Region::Forward).unwrap()[0]
        };
        let ids = Tensor::ints(DType::I64, [3], vec![1, 1, 1]);
        let ids = add(Op::Constant(ConstantOp { value: ids }), &[]);
        let ty = TensorType::new(DType::F32, [2, 2]);
        let table = add(Op::Input(Input { name: "0".into(), ty }), &[]);
        let rows = add(Op::Embedding(Embedding { padding_idx: None }), &[table, ids]);
        body.add_output("0", rows, OutputKind::Result);
        let (mut table, mut out) = ([1f32, 2.0, 3.0, 4.0], [0f32; 6]);
        run(body, &mut table, &mut out);
        assert_eq!(out, [3.0, 4.0, 3.0, 4.0, 3.0, 4.0]);
    }

    #[test]
    fn an_operand_may_be_taken_twice() {
        let mut body = Graph::new("kernel");
        let mut add = |op: Op, inputs: &[ValueId]| {
            body.add(op, inputs, Origin::none(), Region::Forward).unwrap()[0]
        };
        let ty = TensorType::new(DType::F32, [2]);
        let x = add(Op::Input(Input { name: "0".into(), ty }), &[]);
        let both = add(Op::Concat(Concat { axis: 0 }), &[x, x]);
        body.add_output("0", both, OutputKind::Result);
        let (mut x, mut out) = ([1f32, 2.0], [0f32; 4]);
        run(body, &mut x, &mut out);
        assert_eq!(out, [1.0, 2.0, 1.0, 2.0]);
    }
}
