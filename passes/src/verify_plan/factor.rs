//! Verifies the factor of every gradient symbolically, through the bodies of all kernels.
//!
//! Every range of bytes holds an abstract value: zero, independent of the loss (weights, activations),
//! or linear in it, and then `scale × factor ×` the derivative of some micro-steps' loss sums. Bodies are
//! replayed node by node, by what [`Op::linear`] says: linear operations carry the factor, sums need
//! equal ones, a mean over ranks divides it, a quotient of values with equal factors has none.
//!
//! If the forward pass averages activations over all ranks, the derivative with respect to a rank's contribution is the mean of the ranks'
//! cotangents: it has the same factor and remains to be reduced. Every such mean of the micro-step permits one mean of cotangents of its
//! type.
//!
//! The sum of a reproducible plan over micro-steps is followed level by level: all micro-steps are replayed, each with its number.
//!
//! P105  bytes are read in the dtype in which they were written, and parameters in their stored
//!       dtype
//! P308  gradients that are clipped or read by the optimizer have exactly the factor 1 / (C·A·N)
//! P309  a scaled value is used only linearly, and added only to values with the same factor
//! P310  a gradient sums every micro-step of this step exactly once, and all ranks exactly once; a sum in a tree adds neighbors
//!       of equal size
//! P311  the statistics that decide whether to skip the step, and the sums that scale it, count
//!       every gradient element exactly once over all ranks

use super::broken;
use frit_ir::ops::reproducible::MAX_PIECES;
use frit_ir::ops::{Adafactor, AdafactorPart, BinaryFn, Linear, ReduceKind, StateName};
use frit_ir::plan::{
    Action, Arena, Buffer, BufferId, Kernel, KernelId, Phase, PhaseName, Place, Plan, TaskId,
};
use frit_ir::{Code, DType, Diagnostic, Graph, Node, Op, Region, TensorType, ValueId};
use rangemap::RangeMap;
use std::collections::HashMap;
use std::ops::Range;

/// Micro-steps of a step that are replayed: enough to see a second one and one that is neither first
/// nor last. Those of a reproducible plan are all replayed.
const MICRO_STEPS: usize = 3;

/// How a value depends on the loss.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Value {
    /// Zero, of any factor and dtype.
    Zero,
    /// Independent of the loss.
    Free,
    /// `scale × factor ×` the derivative of the loss sums of these micro-steps (a bit each), summed over this
    /// many ranks.
    Scaled { factor: f64, micro_steps: u128, ranks: usize },
    /// Sums over gradient elements, of which each counts `weight` times; what a rank holds is of one of
    /// `shards` parts.
    Statistics { weight: f64, shards: usize },
    /// The number of a micro-step of this step.
    Number(usize),
}

/// Why a value is not linear in the loss.
type Problem = &'static str;

const NOT_LINEAR: Problem = "is not linear in a scaled gradient that it reads";
const PRODUCT: Problem = "multiplies two scaled gradients";
const UNEQUAL: Problem = "adds gradients of different factors";
const FREE: Problem = "adds a scaled gradient to a value that is not scaled";
const TWICE: Problem = "reduces over ranks a value that is already reduced";
const STATISTICS: Problem = "combines statistics that count elements differently";
const TREE: Problem = "does not add equally many micro-steps that follow each other";
const NUMBER: Problem = "is not given the number of the micro-step";

/// The sum of two values.
fn sum(a: Value, b: Value) -> Result<Value, Problem> {
    match (a, b) {
        (Value::Zero, other) | (other, Value::Zero) => Ok(other),
        (Value::Free, Value::Free) => Ok(Value::Free),
        (
            Value::Scaled { factor: f, micro_steps: m, ranks: r },
            Value::Scaled { factor: g, micro_steps: n, ranks: s },
        ) => {
            if (f - g).abs() > f.abs() * 1e-9 || r != s {
                return Err(UNEQUAL);
            }
            Ok(Value::Scaled { factor: f, micro_steps: m | n, ranks: r })
        }
        (statistics @ Value::Statistics { .. }, other)
        | (other, statistics @ Value::Statistics { .. }) => {
            // Counts and losses travel with them.
            if other == Value::Free || other == statistics {
                Ok(statistics)
            } else {
                Err(STATISTICS)
            }
        }
        _ => Err(FREE),
    }
}

/// The sum of some values.
fn added<'a>(mut values: impl Iterator<Item = &'a Value>) -> Result<Value, Problem> {
    values.try_fold(Value::Zero, |all, v| sum(all, *v))
}

/// The product, or any operation that is linear in each operand.
fn product(values: &[Value]) -> Result<Value, Problem> {
    let mut scaled = values.iter().filter(|v| matches!(v, Value::Scaled { .. }));
    match (scaled.next(), scaled.next()) {
        (Some(_), Some(_)) => Err(PRODUCT),
        (Some(value), None) => Ok(*value),
        _ if values.contains(&Value::Zero) => Ok(Value::Zero),
        _ => Ok(Value::Free),
    }
}

/// The values that a node makes of its operands, the same for all its results.
fn node(node: &Node, values: &[Value], micro_step: u32) -> Result<Value, Problem> {
    let scaled = |v: &Value| matches!(v, Value::Scaled { .. });
    let statistics = |v: &Value| matches!(v, Value::Statistics { .. });
    match &node.op {
        Op::LossScale(op) => {
            let micro_steps = 1 << micro_step;
            Ok(Value::Scaled { factor: op.factor, micro_steps, ranks: 1 })
        }
        op if values.iter().any(statistics) => match (op, values) {
            (Op::Concat(_) | Op::Binary(BinaryFn::Add), _) => added(values.iter()),
            (Op::Reshape(_) | Op::Slice(_) | Op::Split(_) | Op::RoundStats, [value]) => Ok(*value),
            // The decision itself; its operand is judged where it is read.
            (Op::Unscale(_), _) => Ok(Value::Free),
            _ => Err(STATISTICS),
        },
        // The decision whether to step, and the step itself: their operands are checked where they are read.
        Op::GradStats(_) | Op::OptimizerStep(_) | Op::MuonMomentum(_) | Op::EmaStep => {
            Ok(Value::Free)
        }
        Op::Constant(c) => {
            Ok(if c.value.as_splat() == Some(0.0) { Value::Zero } else { Value::Free })
        }
        Op::ScaledCast(op) => Ok(match values[0] {
            Value::Scaled { factor, micro_steps, ranks } => {
                Value::Scaled { factor: factor * op.factor, micro_steps, ranks }
            }
            other => other,
        }),
        // Equal factors cancel: a gradient without the loss scale.
        Op::Binary(BinaryFn::Div) if matches!(values, [a @ Value::Scaled { .. }, b] if a == b) => {
            Ok(Value::Free)
        }
        op => match op.linear() {
            Linear::InEach => product(values),
            Linear::InAll => added(values.iter()),
            Linear::In(terms) => {
                let others = values.iter().enumerate().filter(|(i, _)| !terms.contains(i));
                if others.into_iter().any(|(_, v)| scaled(v)) {
                    return Err(NOT_LINEAR);
                }
                added(terms.iter().filter_map(|i| values.get(*i)))
            }
            Linear::No if values.iter().any(scaled) => Err(NOT_LINEAR),
            Linear::No => Ok(Value::Free),
        },
    }
}

/// The results of a body, or what is wrong at which operation.
type Results = Result<Vec<Value>, (Problem, &'static str)>;

/// The bytes of one arena: value and dtype (`None` for any).
type Map = RangeMap<usize, (Value, Option<DType>)>;

struct Replay<'a> {
    plan: &'a Plan,
    /// Device memory that lives as long as the run and that does not, and host memory.
    arenas: [Map; 3],
    micro_step: u32,
    /// Micro-steps since the last update.
    current: u128,
    /// Where the number of the micro-step is.
    number: Option<BufferId>,
    /// Results by kernel and operands, within one micro-step.
    results: HashMap<(KernelId, String), Results>,
    /// Types of activations that this micro-step averaged over ranks, less those of averaged cotangents.
    averaged: Vec<TensorType>,
    found: Vec<Diagnostic>,
}

/// Adds what is found to `found`; the memory invariants must hold.
pub(super) fn verify(plan: &Plan, found: &mut Vec<Diagnostic>) {
    let mut replay = Replay {
        plan,
        arenas: Default::default(),
        micro_step: 0,
        current: 0,
        number: plan.states.iter().find(|s| s.name == StateName::MicroStep).map(|s| s.buffer),
        results: HashMap::new(),
        averaged: Vec::new(),
        found: Vec::new(),
    };
    for buffer in plan.buffers.iter().filter(|b| b.arena.outlives_step()) {
        replay.hold(buffer, Value::Free, None);
    }
    for group in &plan.groups {
        replay.hold(&plan.buffers[group.master], Value::Free, Some(group.dtype));
        for copy in &group.copies {
            replay.hold(&plan.buffers[copy.buffer], Value::Free, Some(copy.dtype));
        }
        for state in group.states.iter().filter(|s| s.name.is_sum()) {
            replay.hold(&plan.buffers[state.buffer], Value::Zero, None);
        }
    }
    if let Some(number) = replay.number {
        replay.hold(&plan.buffers[number], Value::Number(0), None);
    }
    let most = plan.reproducible.map_or(MICRO_STEPS, |pieces| pieces.min(MAX_PIECES));
    // Twice, so that what one step leaves behind for the next is seen too.
    for _ in 0..2 {
        for phase in &plan.phases {
            let micro = phase.name == PhaseName::MicroStep;
            let runs = if micro { plan.accumulation.min(most) } else { 1 };
            for _ in 0..runs {
                if micro {
                    replay.current |= 1 << replay.micro_step;
                }
                replay.run(phase);
                if micro {
                    replay.micro_step += 1;
                    replay.results.clear();
                    replay.averaged.clear();
                }
                if !replay.found.is_empty() {
                    found.append(&mut replay.found);
                    return;
                }
            }
        }
        replay.current = 0;
    }
}

impl Replay<'_> {
    /// Notes what a whole buffer holds at first.
    fn hold(&mut self, buffer: &Buffer, value: Value, dtype: Option<DType>) {
        if buffer.bytes > 0 {
            let range = buffer.offset..buffer.offset + buffer.bytes;
            self.arenas[position(buffer.arena)].insert(range, (value, dtype));
        }
    }

    fn run(&mut self, phase: &Phase) {
        for i in phase.tasks() {
            if self.task(i).is_none() {
                return;
            }
        }
    }

    /// Replays a task; `None` after a finding.
    fn task(&mut self, i: TaskId) -> Option<()> {
        let plan = self.plan;
        match &plan.tasks[i].action {
            Action::Zero { places } => places.iter().for_each(|p| {
                let is_number = Some(p.buffer) == self.number;
                self.write(p, if is_number { Value::Number(0) } else { Value::Zero });
            }),
            Action::Copy { from, to } | Action::Reshard { from, to, .. } => {
                let value = self.read(i, from)?;
                self.write(to, value);
            }
            Action::AllGather { send, recv, .. } => {
                let value = self.read(i, send)?;
                self.write(recv, value);
            }
            Action::ReduceScatter { reduce, send, recv, .. }
            | Action::AllReduce { reduce, send, recv, .. } => {
                let n = plan.team(&plan.tasks[i].action, 0).map_or(1, |team| team.count);
                let value = match self.read(i, send)? {
                    value if self.is_inside_derivative(i, value) => value,
                    Value::Scaled { ranks, .. } if ranks * n > plan.world_size => {
                        return self.problem(i, TWICE, "");
                    }
                    Value::Scaled { factor, micro_steps, ranks } => {
                        let mean = *reduce == ReduceKind::Mean;
                        let factor = if mean { factor / n as f64 } else { factor };
                        Value::Scaled { factor, micro_steps, ranks: ranks * n }
                    }
                    Value::Statistics { weight, shards } => {
                        // Every part is on as many ranks as there are replicas of it.
                        let mean = *reduce == ReduceKind::Mean;
                        let replicas = n as f64 / shards as f64 / if mean { n as f64 } else { 1.0 };
                        Value::Statistics { weight: weight * replicas, shards: 1 }
                    }
                    other => other,
                };
                self.write(recv, value);
            }
            Action::Kernel { kernel, reads, writes } => {
                let mut values = Vec::with_capacity(reads.len());
                for place in reads {
                    values.push(self.read(i, place)?);
                }
                self.judge(i, &plan.kernels[*kernel], &values)?;
                let runs = |wanted: fn(&Op) -> bool| {
                    plan.kernels[*kernel].body.nodes().any(|(_, n)| wanted(&n.op))
                };
                if runs(|op| matches!(op, Op::TreeSum)) {
                    return self.tree_sum(i, &values, writes);
                }
                if runs(|op| matches!(op, Op::GradStats(_))) {
                    let value = self.statistics_of(i, reads, 1.0)?;
                    writes.iter().for_each(|place| self.write(place, value));
                    return Some(());
                }
                if let Some(op) = adafactor(&plan.kernels[*kernel].body) {
                    let sums = self.statistics_of(i, &reads[1..2], op.share)?;
                    let made = match op.part {
                        AdafactorPart::Sums => [sums, Value::Free],
                        AdafactorPart::Moments => [Value::Free, sums],
                        AdafactorPart::Step => [Value::Free; 2],
                    };
                    for (place, value) in writes.iter().zip(made) {
                        self.write(place, value);
                    }
                    return Some(());
                }
                let key = (*kernel, format!("{values:?}"));
                let micro_step = self.micro_step;
                let result = self
                    .results
                    .entry(key)
                    .or_insert_with(|| body(&plan.kernels[*kernel].body, &values, micro_step));
                match result.clone() {
                    Ok(results) => {
                        for (place, value) in writes.iter().zip(results) {
                            self.write(place, value);
                        }
                    }
                    Err((problem, name)) => return self.problem(i, problem, name),
                }
            }
        }
        Some(())
    }

    /// Whether task `i` averages activations over all ranks, or what is cotangent to such a mean.
    fn is_inside_derivative(&mut self, i: TaskId, value: Value) -> bool {
        let task = &self.plan.tasks[i];
        let Action::AllReduce { group: None, reduce: ReduceKind::Mean, send, .. } = &task.action
        else {
            return false;
        };
        match (task.region, value) {
            (Region::Forward, Value::Free) => {
                self.averaged.push(send.ty.clone());
                true
            }
            (Region::Backward, Value::Scaled { ranks: 1, .. }) => {
                let at = self.averaged.iter().position(|ty| *ty == send.ty);
                at.map(|at| self.averaged.swap_remove(at)).is_some()
            }
            _ => false,
        }
    }

    /// Adds the operand of this micro-step to a sum in a binary tree: level by level to what waits there, which must be of as many
    /// micro-steps, those just before.
    fn tree_sum(&mut self, i: TaskId, values: &[Value], writes: &[Place]) -> Option<()> {
        let [operand, number, levels @ ..] = values else { return self.misplaced(i, TREE) };
        let k = (self.current.count_ones() as usize).saturating_sub(1);
        if *number != Value::Number(k) {
            return self.misplaced(i, NUMBER);
        }
        let merged = (k.trailing_ones() as usize).min(levels.len());
        let mut sum = *operand;
        // The micro-steps in the sum, and those of the level that waits for it.
        let mut these = 1u128 << self.micro_step;
        for (level, waiting) in levels[..merged].iter().enumerate() {
            let before = these >> (1u32 << level);
            sum = match (sum, *waiting) {
                (
                    Value::Scaled { factor, micro_steps: a, ranks },
                    Value::Scaled { factor: f, micro_steps: b, ranks: r },
                ) if (f, r) == (factor, ranks) && (a, b) == (these, before) => {
                    Value::Scaled { factor, micro_steps: a | b, ranks }
                }
                (Value::Free, Value::Free) => Value::Free,
                (Value::Zero, Value::Zero) => Value::Zero,
                _ => return self.misplaced(i, TREE),
            };
            these |= before;
        }
        if matches!(sum, Value::Scaled { micro_steps, .. } if micro_steps != these) {
            return self.misplaced(i, TREE);
        }
        let to = if merged == levels.len() { 0 } else { merged };
        for (level, place) in writes.iter().enumerate() {
            self.write(place, if level == to { sum } else { *levels.get(level)? });
        }
        Some(())
    }

    /// The statistics of gradients of groups that are sharded alike, each element times `weight`.
    fn statistics_of(&mut self, i: TaskId, reads: &[Place], weight: f64) -> Option<Value> {
        let plan = self.plan;
        let shards = |place: &Place| {
            let spec = plan.gradients.iter().find(|g| g.place == *place)?;
            Some(plan.groups[spec.group].shards())
        };
        let first = reads.first().and_then(shards);
        match first {
            Some(n) if reads.iter().all(|r| shards(r) == first) => {
                Some(Value::Statistics { weight, shards: n })
            }
            _ => {
                self.problem(i, STATISTICS, "");
                None
            }
        }
    }

    /// P308, P310, P311: gradients where they are clipped and where they are applied.
    fn judge(&mut self, i: TaskId, kernel: &Kernel, values: &[Value]) -> Option<()> {
        let plan = self.plan;
        let decides = kernel.body.nodes().any(|(_, n)| matches!(n.op, Op::Unscale(_)));
        let sums: &[usize] = match adafactor(&kernel.body).map(|op| op.part) {
            Some(AdafactorPart::Moments) => &[2],
            Some(AdafactorPart::Step) => &[4, 5],
            _ if decides => &[0],
            _ => &[],
        };
        for index in sums {
            let counted = match values.get(*index) {
                Some(Value::Statistics { weight, shards: 1 }) => *weight,
                _ => 0.0,
            };
            if (counted - 1.0).abs() > 1e-6 {
                let message = format!("reads statistics that count every element {counted} times");
                self.found.push(broken(plan, Code::ElementsCounted, i, message));
                return None;
            }
        }
        for (_, node) in kernel.body.nodes() {
            let gradients = match &node.op {
                Op::GradStats(_) => &node.inputs[..],
                Op::OptimizerStep(_) | Op::Adafactor(_) => &node.inputs[1..2],
                Op::MuonMomentum(_) => &node.inputs[..1],
                _ => continue,
            };
            for gradient in gradients {
                let value = operand(&kernel.body, *gradient).and_then(|at| values.get(at));
                self.judge_gradient(i, value.copied().unwrap_or(Value::Free))?;
            }
        }
        Some(())
    }

    /// P308, P310 for a gradient that task `i` reads.
    fn judge_gradient(&mut self, i: TaskId, gradient: Value) -> Option<()> {
        let plan = self.plan;
        let n = plan.loss_capacity * plan.accumulation * plan.world_size;
        let (factor, micro_steps, ranks) = match gradient {
            // No loss element reaches it in this step.
            Value::Zero => return Some(()),
            Value::Free | Value::Statistics { .. } | Value::Number(_) => (0.0, 0, 1),
            Value::Scaled { factor, micro_steps, ranks } => (factor, micro_steps, ranks),
        };
        let (code, message) = if (factor * n as f64 - 1.0).abs() > 1e-9 {
            let times = factor * n as f64;
            (
                Code::GradientFactor,
                format!("reads gradients of {times} times the factor 1/{n} of the mean"),
            )
        } else if ranks != plan.world_size {
            (Code::SummedSteps, format!("reads gradients of {ranks} of {} ranks", plan.world_size))
        } else if micro_steps != self.current {
            let seen = (micro_steps & self.current).count_ones();
            let (all, old) =
                (self.current.count_ones(), (micro_steps & !self.current).count_ones());
            let message =
                format!("reads gradients of {seen} of {all} micro-steps, and of {old} old ones");
            (Code::SummedSteps, message)
        } else {
            return Some(());
        };
        self.found.push(broken(plan, code, i, message));
        None
    }

    fn problem(&mut self, i: TaskId, problem: Problem, name: &str) -> Option<()> {
        let what = if name.is_empty() { String::new() } else { format!("`{name}` ") };
        self.found.push(broken(self.plan, Code::ScaledUse, i, format!("{what}{problem}")));
        None
    }

    fn misplaced(&mut self, i: TaskId, problem: Problem) -> Option<()> {
        self.found.push(broken(self.plan, Code::SummedSteps, i, problem.into()));
        None
    }

    fn read(&mut self, i: TaskId, place: &Place) -> Option<Value> {
        let plan = self.plan;
        let (arena, range) = self.range(place);
        let mut value = Value::Zero;
        for (_, (part, dtype)) in self.arenas[arena].overlapping(&range) {
            let name = &plan.buffers[place.buffer].name;
            if let Some(dtype) = dtype.filter(|d| *d != place.ty.dtype) {
                let message = format!("reads `{name}` as {}, written as {dtype}", place.ty.dtype);
                self.found.push(broken(plan, Code::OtherDtype, i, message));
                return None;
            }
            match sum(value, *part) {
                Ok(joined) => value = joined,
                Err(_) => {
                    let message = format!("mixes scaled and unscaled values of `{name}`");
                    self.found.push(broken(plan, Code::ScaledUse, i, message));
                    return None;
                }
            }
        }
        Some(value)
    }

    fn write(&mut self, place: &Place, value: Value) {
        let (arena, range) = self.range(place);
        if !range.is_empty() {
            let dtype = (value != Value::Zero).then_some(place.ty.dtype);
            self.arenas[arena].insert(range, (value, dtype));
        }
    }

    fn range(&self, place: &Place) -> (usize, Range<usize>) {
        let buffer = &self.plan.buffers[place.buffer];
        let begin = buffer.offset + place.offset;
        (position(buffer.arena), begin..begin + place.ty.bytes())
    }
}

fn position(arena: Arena) -> usize {
    match arena {
        Arena::Persistent => 0,
        Arena::Workspace => 1,
        Arena::Host => 2,
    }
}

/// The position of a value among the operands of a body.
fn operand(body: &Graph, value: ValueId) -> Option<usize> {
    let mut inputs = body.nodes().filter(|(_, n)| matches!(n.op, Op::Input(_)));
    inputs.position(|(_, n)| n.outputs[0] == value)
}

/// The part of Adafactor's step that a body is.
fn adafactor(body: &Graph) -> Option<&Adafactor> {
    body.nodes().find_map(|(_, n)| if let Op::Adafactor(op) = &n.op { Some(op) } else { None })
}

/// The values a body returns, or what is wrong at which operation.
fn body(body: &Graph, operands: &[Value], micro_step: u32) -> Results {
    let mut values: HashMap<ValueId, Value> = HashMap::new();
    let mut operands = operands.iter();
    for (_, n) in body.nodes() {
        let inputs: Vec<Value> = n.inputs.iter().map(|v| values[v]).collect();
        let value = match &n.op {
            Op::Input(_) => *operands.next().unwrap_or(&Value::Free),
            Op::Binary(BinaryFn::Mul)
                if inputs.iter().any(|v| matches!(v, Value::Statistics { .. })) =>
            {
                weighted(body, n, &inputs).map_err(|problem| (problem, n.op.name()))?
            }
            Op::Binary(BinaryFn::Add) if inputs.iter().any(|v| matches!(v, Value::Number(_))) => {
                next(body, n, &inputs)
            }
            op => node(n, &inputs, micro_step).map_err(|problem| (problem, op.name()))?,
        };
        values.extend(n.outputs.iter().map(|v| (*v, value)));
        if let (Op::Quantize(_), [_, amax]) = (&n.op, &n.outputs[..]) {
            // A magnitude only chooses later scales, which are divided out again.
            values.insert(*amax, Value::Free);
        }
    }
    Ok(body.outputs.iter().map(|o| values[&o.value]).collect())
}

/// The number of a micro-step and one; anything else that is made of it is not followed.
fn next(body: &Graph, node: &Node, values: &[Value]) -> Value {
    for (i, value) in values.iter().enumerate() {
        let other = node.inputs.get(1 - i).and_then(|v| body.constant(*v));
        if let (Value::Number(k), Some(1.0)) = (value, other.and_then(|c| c.as_splat())) {
            return Value::Number(k + 1);
        }
    }
    Value::Free
}

/// Statistics times a constant.
fn weighted(body: &Graph, node: &Node, values: &[Value]) -> Result<Value, Problem> {
    for (i, value) in values.iter().enumerate() {
        let times =
            node.inputs.get(1 - i).and_then(|v| body.constant(*v)).and_then(|c| c.as_splat());
        if let (Value::Statistics { weight, shards }, Some(times)) = (value, times) {
            return Ok(Value::Statistics { weight: weight * times, shards: *shards });
        }
    }
    Err(STATISTICS)
}
