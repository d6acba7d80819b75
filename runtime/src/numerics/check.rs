//! Stops at the first task that produces a non-finite value, and names the operation.
//!
//! *Produces*: a NaN where no operand has one, or an infinity where neither an operand nor a constant of the kernel has one.
//! Non-finite operands come from data or parameters, which are checked before the first task. Kernels of several operations are
//! replayed node by node in the interpreter, on the operands that the task read.

use super::cause;
use super::values::decode;
use crate::RunError;
use crate::device::Device;
use frit_ir::interpret::{self, EvalError, Options};
use frit_ir::plan::{Action, ParamHome, Place, Plan, Task, TaskId};
use frit_ir::{DType, Graph, Node, Op, Tensor};
use std::fmt;

/// Maximum operations of a kernel that is replayed: the interpreter is slow.
const REPLAYED_FLOPS: u64 = 4_000_000_000;

/// A non-finite value and its cause.
#[derive(Clone, Debug, PartialEq)]
pub struct NotFinite {
    /// `inf` or `NaN`.
    pub value: &'static str,
    /// The operation that produced it, if known, or the input or parameter.
    pub op: String,
    /// Element type of the result.
    pub dtype: DType,
    /// Module path.
    pub scope: String,
    /// The task.
    pub task: String,
    /// The part of the step: `forward`, `backward`, `update`, or `data`.
    pub region: String,
    /// The rank.
    pub rank: usize,
    /// Facts: how many elements, and the ranges of the operands.
    pub facts: Vec<String>,
    /// The likely cause.
    pub cause: String,
    /// What to do.
    pub remedy: String,
}

impl fmt::Display for NotFinite {
    /// The first line; [`NotFinite::facts`] and the rest are the lines below it.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let NotFinite { value, op, dtype, task, region, rank, .. } = self;
        let scope = if self.scope.is_empty() { "the root" } else { &self.scope };
        write!(
            f,
            "{op} in {dtype} gives {value} in scope `{scope}` (task `{task}`, {region}, rank {rank})"
        )
    }
}

/// Numbers of NaN and infinite elements of a tensor.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Bad {
    nan: usize,
    inf: usize,
    first: Option<usize>,
}

impl Bad {
    fn of(values: &[f64]) -> Bad {
        let mut bad = Bad::default();
        for (i, x) in values.iter().enumerate().filter(|(_, x)| !x.is_finite()) {
            if x.is_nan() {
                bad.nan += 1
            } else {
                bad.inf += 1
            }
            bad.first.get_or_insert(i);
        }
        bad
    }
}

/// Operands as they were before the task ran.
pub(super) struct Before {
    reads: Vec<(Place, Option<Vec<u8>>)>,
}

impl Before {
    /// Copies the operands that the task overwrites.
    pub(super) fn read(device: &impl Device, task: &Task) -> Result<Before, RunError> {
        let writes = task.action.writes();
        let mut reads = Vec::new();
        for place in task.action.reads() {
            let overwritten = writes.iter().any(|w| w.buffer == place.buffer);
            let kept = if overwritten { Some(bytes(device, place)?) } else { None };
            reads.push((place.clone(), kept));
        }
        Ok(Before { reads })
    }

    fn tensors(self, device: &impl Device) -> Result<Vec<Tensor>, RunError> {
        let mut tensors = Vec::new();
        for (place, kept) in self.reads {
            let bytes = kept.map_or_else(|| bytes(device, &place), Ok)?;
            tensors.extend(Tensor::from_bytes(place.ty, &bytes).ok());
        }
        Ok(tensors)
    }
}

fn bytes(device: &impl Device, place: &Place) -> Result<Vec<u8>, RunError> {
    device.read(place.buffer, place.offset, place.ty.bytes())
}

/// Checks the inputs and, at the start, the parameters.
pub(super) fn inputs(
    plan: &Plan,
    device: &impl Device,
    rank: usize,
    params: bool,
) -> Result<(), RunError> {
    let check = |kind: &str, name: &str, dtype: DType, bytes: Vec<u8>, help: &str| {
        let values = decode(dtype, &bytes);
        let bad = Bad::of(&values);
        let Some(first) = bad.first else { return Ok(()) };
        Err(RunError::NotFinite(Box::new(NotFinite {
            value: if bad.nan > 0 { "NaN" } else { "inf" },
            op: format!("{kind} `{name}`"),
            dtype,
            scope: String::new(),
            task: "input".into(),
            region: "data".into(),
            rank,
            facts: vec![format!(
                "{} of its {} elements are not finite, the first is element {first}",
                bad.nan + bad.inf,
                values.len()
            )],
            cause: format!("the {kind} itself is not finite"),
            remedy: help.into(),
        })))
    };
    for input in plan.inputs.iter().filter(|i| i.ty.dtype.is_float()) {
        let bytes = device.read(input.buffer, 0, input.ty.bytes())?;
        check("input", &input.name, input.ty.dtype, bytes, "check the data file")?;
    }
    let help = "check the weights with which the plan was compiled";
    for group in plan.groups.iter().filter(|_| params) {
        for segment in &group.segments {
            let Some((_, at, n)) = group.owned(segment, rank) else { continue };
            let (dtype, size) = (group.dtype, group.dtype.size());
            let bytes = device.read(group.master, at * size, n * size)?;
            check("parameter", &plan.params[segment.param].name, dtype, bytes, help)?;
        }
    }
    for param in plan.params.iter().filter(|p| params && p.ty.dtype.is_float()) {
        if let ParamHome::Buffer(buffer) = param.home {
            let bytes = device.read(buffer, 0, param.ty.bytes())?;
            check("buffer", &param.name, param.ty.dtype, bytes, help)?;
        }
    }
    Ok(())
}

/// Checks what task `i` wrote.
pub(super) fn task(
    plan: &Plan,
    device: &impl Device,
    i: TaskId,
    rank: usize,
    before: Before,
) -> Result<(), RunError> {
    let task = &plan.tasks[i];
    let mut found = None;
    for place in task.action.writes().into_iter().filter(|p| p.ty.dtype.is_float()) {
        let values = decode(place.ty.dtype, &bytes(device, place)?);
        let bad = Bad::of(&values);
        if let Some(first) = bad.first {
            found = Some((place, values, bad, first));
            break;
        }
    }
    let Some((place, values, bad, first)) = found else { return Ok(()) };
    let operands = before.tensors(device)?;
    let body = match &task.action {
        Action::Kernel { kernel, .. } => Some(&plan.kernels[*kernel].body),
        _ => None,
    };
    let of_operands = operands.iter().filter_map(|t| t.as_floats()).map(Bad::of);
    let (nan, inf) =
        of_operands.fold((false, false), |(nan, inf), b| (nan || b.nan > 0, inf || b.inf > 0));
    let meant = inf || body.is_some_and(excludes);
    let value = match (bad.nan > 0 && !nan, bad.inf > 0 && !meant) {
        (true, _) => "NaN",
        (_, true) => "inf",
        _ => return Ok(()),
    };
    let replayed = body.and_then(|body| replay(body, &operands));
    let (op, dtype, operands) = match replayed {
        Some(found) => (found.op, found.dtype, found.operands),
        None => (None, place.ty.dtype, operands),
    };
    let mut facts = vec![format!(
        "{} of {} elements of {} are not finite, the first is element {first}",
        bad.nan + bad.inf,
        values.len(),
        place.ty
    )];
    facts.extend(
        operands.iter().enumerate().map(|(k, t)| format!("operand {k}: {}", cause::range(t))),
    );
    let name = op.as_ref().map_or_else(|| task.name.clone(), |op| op.name().into());
    let (cause, remedy) = cause::of(op.as_ref(), dtype, &operands, &task.origin.scope);
    Err(RunError::NotFinite(Box::new(NotFinite {
        value,
        op: name,
        dtype,
        scope: task.origin.scope.to_string(),
        task: task.name.clone(),
        region: task.region.to_string(),
        rank,
        facts,
        cause,
        remedy,
    })))
}

/// Whether −∞ is an intended result: a mask's fill, or the statistics of a fully masked row.
fn excludes(body: &Graph) -> bool {
    body.nodes().any(|(_, n)| match &n.op {
        Op::Constant(c) => c.value.as_floats().is_some_and(|v| v.iter().any(|x| x.is_infinite())),
        Op::Pad(pad) => pad.value.is_infinite(),
        Op::Attention(_) | Op::LogSoftmax(_) => true,
        _ => false,
    })
}

/// The first node of a body with a non-finite result.
struct Replayed {
    op: Option<Op>,
    dtype: DType,
    operands: Vec<Tensor>,
}

/// Runs a body node by node; `None` if that takes too long or fails.
fn replay(body: &Graph, operands: &[Tensor]) -> Option<Replayed> {
    let flops = |n: &Node| {
        let types = |ids: &[frit_ir::ValueId]| ids.iter().map(|v| body.ty(*v)).collect::<Vec<_>>();
        n.op.flops(&types(&n.inputs), &types(&n.outputs))
    };
    if body.nodes().map(|(_, n)| flops(n)).sum::<u64>() > REPLAYED_FLOPS {
        // A single operation is known without replay.
        let mut inner = body.nodes().map(|(_, n)| n).filter(|n| !n.op.is_leaf());
        let only = inner.next().filter(|_| inner.next().is_none())?;
        let dtype = body.ty(only.outputs[0]).dtype;
        return Some(Replayed { op: Some(only.op.clone()), dtype, operands: operands.to_vec() });
    }
    let mut values: Vec<Option<Tensor>> = vec![None; body.n_values()];
    let mut fed = operands.iter();
    for (_, node) in body.nodes() {
        if matches!(node.op, Op::Input(_)) {
            values[node.outputs[0].0 as usize] = Some(fed.next()?.clone());
            continue;
        }
        let inputs: Option<Vec<&Tensor>> =
            node.inputs.iter().map(|v| values[v.0 as usize].as_ref()).collect();
        let inputs = inputs?;
        let results = match interpret::eval_op(&node.op, &inputs, Options::default()) {
            Ok(results) => results,
            // A label that is not a class gives NaN on every device.
            Err(EvalError::Index { .. }) => {
                let (op, dtype) = (Some(node.op.clone()), body.ty(node.outputs[0]).dtype);
                let operands = inputs.into_iter().cloned().collect();
                return Some(Replayed { op, dtype, operands });
            }
            Err(_) => return None,
        };
        let finite = |t: &Tensor| t.as_floats().is_none_or(|v| v.iter().all(|x| x.is_finite()));
        let clean = inputs.iter().all(|t| finite(t));
        let bad = !node.op.is_leaf() && clean && !results.iter().all(finite);
        if bad {
            let operands = inputs.into_iter().cloned().collect();
            let dtype = results[0].dtype();
            return Some(Replayed { op: Some(node.op.clone()), dtype, operands });
        }
        for (v, result) in node.outputs.iter().zip(results) {
            values[v.0 as usize] = Some(result);
        }
    }
    None
}
