//! L24 and L25: unnecessary casts.

use super::Findings;
use frit_ir::ops::BinaryFn;
use frit_ir::plan::{Action, BufferId, Place, Plan};
use frit_ir::{DType, Graph, Op, ValueId};
use std::collections::HashMap;

/// Fewer elements than this are not worth a word.
const BRANCH: usize = 1024;

/// L25: promotion of a low-precision tensor by a single f32 element that is no constant.
pub(super) fn widened(graph: &Graph, found: &mut Findings) {
    for (_, node) in graph.nodes() {
        let arithmetic = matches!(
            node.op,
            Op::Binary(BinaryFn::Add | BinaryFn::Sub | BinaryFn::Mul | BinaryFn::Div)
        );
        let ty = graph.ty(node.outputs[0]);
        if !arithmetic || ty.dtype != DType::F32 || ty.shape.numel() < BRANCH {
            continue;
        }
        let widens = |v: &ValueId| match &graph.def(*v).op {
            Op::Cast(_) => graph.ty(graph.def(*v).inputs[0]).dtype.is_low_precision(),
            _ => false,
        };
        let single = |v: &ValueId| graph.ty(*v).shape.numel() == 1 && graph.constant(*v).is_none();
        let (a, b) = (&node.inputs[0], &node.inputs[1]);
        if (widens(a) && single(b)) || (widens(b) && single(a)) {
            let message = format!(
                "{} of {} elements is fp32 because of one scalar",
                node.op.name(),
                ty.shape.numel()
            );
            found.add("L25", &node.origin, node.op.name(), message);
        }
    }
}

/// L24: a cast whose operand, followed through rearrangements and, where nothing is lost, over kernels,
/// was cast from the very dtype it goes to. Rounding on the way counts only if nothing but the widening
/// reads the rounded value: kept for others, or for later, it is what it should be. Nor does it count where the configuration states that
/// every value or parameter is rounded (`stated`): without it, the step would compute other numbers.
pub(super) fn ping_pong(plan: &Plan, stated: bool, found: &mut Findings) {
    let mut known = CastFrom::default();
    for task in &plan.tasks {
        let Action::Kernel { kernel, reads, writes } = &task.action else {
            task.action.writes().into_iter().for_each(|p| known.write(p, None));
            continue;
        };
        let body = &plan.kernels[*kernel].body;
        let readers = readers(body);
        let mut from: HashMap<ValueId, DType> = HashMap::new();
        let mut operands = reads.iter();
        for (_, node) in body.nodes() {
            // A concatenation is of the widest of its dtypes, as in PyTorch.
            let inherited = match node.inputs[..] {
                [operand] => from.get(&operand).copied(),
                _ => None,
            };
            let origin = match &node.op {
                Op::Input(_) => operands.next().and_then(|p| known.read(p)),
                Op::Cast(cast) => {
                    let own = body.ty(node.inputs[0]).dtype;
                    let rounds = !cast.to.widens_to(own);
                    let back = inherited == Some(cast.to) && own.is_float();
                    let is_kept = stated || readers[node.inputs[0].0 as usize] > 1;
                    if back && !(rounds && is_kept) {
                        let message = format!("{} is cast to {own} and back", cast.to);
                        found.add("L24", &task.origin, &task.name, message);
                    }
                    (own.is_float() && cast.to.is_float()).then_some(own)
                }
                op if op.is_layout() => inherited,
                _ => None,
            };
            // A value with another reader is rounded for that reader.
            let kept = |v: &ValueId| readers[v.0 as usize] == 1 || !is_rounded(body, *v);
            if let (Some(origin), Some(v)) = (origin, node.outputs.first().filter(|v| kept(v))) {
                from.insert(*v, origin);
            }
        }
        for (output, place) in body.outputs.iter().zip(writes) {
            let exact = from.get(&output.value).filter(|_| !is_rounded(body, output.value));
            known.write(place, exact.copied());
        }
    }
}

/// How often each value is read, as operand or as output.
fn readers(body: &Graph) -> Vec<usize> {
    let mut readers: Vec<usize> = body.users().iter().map(Vec::len).collect();
    body.outputs.iter().for_each(|o| readers[o.value.0 as usize] += 1);
    readers
}

fn is_rounded(body: &Graph, v: ValueId) -> bool {
    body.ty(v).dtype.is_low_precision()
}

/// The dtype that the bytes of a place were cast from, if all that was done since is to move them.
#[derive(Default)]
struct CastFrom {
    /// By buffer: first byte, number of bytes, dtype.
    ranges: HashMap<BufferId, Vec<(usize, usize, DType)>>,
}

impl CastFrom {
    fn read(&self, place: &Place) -> Option<DType> {
        let whole = (place.offset, place.ty.bytes());
        let ranges = self.ranges.get(&place.buffer)?;
        ranges.iter().find(|(at, n, _)| (*at, *n) == whole).map(|(.., dtype)| *dtype)
    }

    fn write(&mut self, place: &Place, from: Option<DType>) {
        let (begin, bytes) = (place.offset, place.ty.bytes());
        let ranges = self.ranges.entry(place.buffer).or_default();
        ranges.retain(|(at, n, _)| at + n <= begin || begin + bytes <= *at);
        ranges.extend(from.map(|dtype| (begin, bytes, dtype)));
    }
}
