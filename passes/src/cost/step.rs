//! Predicts the duration of a step whose tasks run sequentially, as planned and in f32.

use super::Device;
use frit_ir::plan::{Action, BufferId, Place, Plan, Task};
use frit_ir::{DType, Op};
use std::collections::HashSet;

/// Microseconds of a step of this plan whose tasks run one after the other.
pub fn step_us(plan: &Plan) -> f64 {
    plan.tasks.iter_enumerated().map(|(i, t)| plan.runs(i) as f64 * t.cost_us).sum()
}

/// The same if every tensor in low precision were f32: kernels that only cast and copies of parameters disappear, GEMMs
/// run at the rate of f32, and low-precision bytes moved or sent double. The plan's durations are those of `device`.
pub fn step_us_in_f32(plan: &Plan, device: &Device) -> f64 {
    let copies = plan.groups.iter().flat_map(|g| &g.copies).map(|c| c.buffer).collect();
    let tasks = plan.tasks.iter_enumerated();
    tasks.map(|(i, t)| plan.runs(i) as f64 * task_us_in_f32(device, plan, t, &copies)).sum()
}

fn task_us_in_f32(device: &Device, plan: &Plan, task: &Task, copies: &HashSet<BufferId>) -> f64 {
    let (reads, writes) = (task.action.reads(), task.action.writes());
    let own: u64 = reads.iter().chain(&writes).map(own_bytes).sum();
    let kept = writes.iter().filter(|p| !copies.contains(&p.buffer));
    let wide: u64 = reads.iter().chain(kept).map(wide_bytes).sum();
    let growth = wide as f64 / own.max(1) as f64;
    let Action::Kernel { kernel, .. } = &task.action else { return task.cost_us * growth };
    let body = &plan.kernels[*kernel].body;
    let mut inner = body.nodes().map(|(_, n)| n).filter(|n| !n.op.is_leaf());
    if inner.all(|n| matches!(n.op, Op::Cast(_))) {
        return 0.0;
    }
    1e6 * device.body_seconds(body, task.bytes as f64 * growth, true)
}

fn own_bytes(place: &&Place) -> u64 {
    place.ty.bytes() as u64
}

fn wide_bytes(place: &&Place) -> u64 {
    let low = place.ty.dtype.is_low_precision();
    if low { (place.ty.shape.numel() * DType::F32.size()) as u64 } else { own_bytes(place) }
}
