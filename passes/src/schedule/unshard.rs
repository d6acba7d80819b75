//! Keeps selected units gathered from forward to backward, so that they are gathered once.
//!
//! In: a lowered plan whose backward gathers again what forward gathered and freed. Out: the same plan, in which backward reads what
//! forward gathered, without the second gather and its preparation. Values are the same, since parameters change only in the update;
//! verify_plan checks this.

use frit_ir::Region;
use frit_ir::plan::{Action, Arena, BufferId, Plan, Task, TaskId, TiSlice, TiVec, UnitId};
use std::collections::{BTreeMap, HashMap, HashSet};

/// A gather of backward that repeats one of forward.
struct Repeated {
    unit: UnitId,
    /// The task.
    task: TaskId,
    /// The buffers that backward and forward gather into.
    backward: BufferId,
    forward: BufferId,
}

/// The units that backward regathers, by decreasing time saved per byte; among equals the last, whose memory is live
/// for the shortest time.
pub(super) fn by_benefit(plan: &Plan) -> Vec<UnitId> {
    let mut units: BTreeMap<UnitId, (f64, f64)> = BTreeMap::new();
    for repeated in repeated(plan) {
        let (saved, held) = units.entry(repeated.unit).or_default();
        *saved += plan.tasks[repeated.task].cost_us;
        *held += plan.buffers[repeated.backward].bytes as f64;
    }
    let mut units: Vec<(f64, UnitId)> =
        units.into_iter().map(|(unit, (saved, held))| (saved / held.max(1.0), unit)).collect();
    units.sort_by(|a, b| b.0.total_cmp(&a.0).then(b.1.cmp(&a.1)));
    units.into_iter().map(|(_, unit)| unit).collect()
}

/// Lets these units stay gathered.
pub(super) fn keep(plan: &mut Plan, units: &[UnitId]) {
    let repeated: Vec<Repeated> =
        repeated(plan).into_iter().filter(|r| units.contains(&r.unit)).collect();
    let kept: HashMap<BufferId, BufferId> =
        repeated.iter().map(|r| (r.backward, r.forward)).collect();
    let mut dropped: TiVec<TaskId, bool> = vec![false; plan.tasks.len()].into();
    repeated.iter().for_each(|r| dropped[r.task] = true);
    drop_unread(plan, &mut dropped);
    for task in &mut plan.tasks {
        for place in task.action.reads_mut() {
            place.buffer = kept.get(&place.buffer).copied().unwrap_or(place.buffer);
        }
    }
    kept.keys().for_each(|&buffer| plan.buffers[buffer].bytes = 0);
    let mut next = TaskId::FIRST;
    for phase in &mut plan.phases {
        let kept = dropped[phase.range()].iter().filter(|dropped| !**dropped).count();
        (phase.begin, phase.end) = (next, TaskId(next.0 + kept));
        next = phase.end;
    }
    let mut dropped = dropped.into_iter();
    plan.tasks.retain(|_: &Task| !dropped.next().unwrap_or(false));
}

/// Drops tasks whose results only dropped tasks read: the cast of a shard, its copy from the host.
fn drop_unread(plan: &mut Plan, dropped: &mut TiSlice<TaskId, bool>) {
    let mut readers: HashMap<BufferId, usize> = HashMap::new();
    for (task, _) in plan.tasks.iter().zip(&*dropped).filter(|(_, dropped)| !**dropped) {
        for place in task.action.reads() {
            *readers.entry(place.buffer).or_default() += 1;
        }
    }
    // Makers come before readers.
    let mut unread: HashSet<BufferId> = HashSet::new();
    for i in plan.tasks.keys().rev() {
        let action = &plan.tasks[i].action;
        let writes = action.writes();
        let unused = !writes.is_empty() && writes.iter().all(|p| unread.contains(&p.buffer));
        if unused && !dropped[i] {
            dropped[i] = true;
            for place in action.reads() {
                *readers.entry(place.buffer).or_default() -= 1;
            }
        }
        if dropped[i] {
            let inner = |b: &BufferId| plan.buffers[*b].arena == Arena::Workspace;
            let read = action.reads().into_iter().map(|p| p.buffer).filter(inner);
            unread.extend(read.filter(|b| readers.get(b).is_none_or(|n| *n == 0)));
        }
    }
    unread.into_iter().for_each(|b| plan.buffers[b].bytes = 0);
}

/// Gathers in backward that repeat a gather of forward in the same dtype, in the same phase.
fn repeated(plan: &Plan) -> Vec<Repeated> {
    let mut found = Vec::new();
    for phase in &plan.phases {
        let mut forward: HashMap<_, BufferId> = HashMap::new();
        for i in phase.tasks() {
            let Action::AllGather { group, ranks: None, recv, .. } = &plan.tasks[i].action else {
                continue;
            };
            let unit = plan.groups[*group].unit;
            let sent = (*group, recv.ty.dtype);
            match (plan.tasks[i].region, forward.get(&sent)) {
                (Region::Forward, _) => {
                    forward.insert(sent, recv.buffer);
                }
                (_, Some(&forward)) => {
                    found.push(Repeated { unit, task: i, backward: recv.buffer, forward });
                }
                (_, None) => {}
            }
        }
    }
    found
}
