//! Verifies collectives. A plan is the same on every rank, so the order is too; the other invariants are:
//!
//! P201  no collective has a single participant
//! P202  every gathered group is read before it is overwritten or, unless it stays gathered, the
//!       phase ends
//! P203  every trainable group is reduced by one reduce-scatter if it is sharded, and by one
//!       all-reduce if it has replicas, each as a mean; in f16, and in reproducible
//!       plans, as a sum, whose division P308 checks
//! P204  frozen groups are not reduced
//! P205  collectives of one kind run on one stream
//! P206  a gather among some of the ranks reads the parts they kept: a split, over that number of
//!       ranks, of the whole group gathered in the same dtype and phase

use super::broken;
use frit_ir::ops::ReduceKind;
use frit_ir::plan::{Action, Arena, BufferId, GroupId, Place, Plan, Stream, TaskId, TiVec};
use frit_ir::{Code, DType, Diagnostic};

/// How gradients are combined that are exchanged in this dtype.
fn expected(plan: &Plan, send: &Place) -> ReduceKind {
    let is_sum = plan.reproducible.is_some() || send.ty.dtype == DType::F16;
    if is_sum { ReduceKind::Sum } else { ReduceKind::Mean }
}

pub(super) fn verify(plan: &Plan, found: &mut Vec<Diagnostic>) {
    // Reduce-scatters and all-reduces by group.
    let mut reductions: TiVec<GroupId, [usize; 2]> = vec![[0; 2]; plan.groups.len()].into();
    for (i, task) in plan.tasks.iter_enumerated() {
        let action = &task.action;
        if plan.team(action, 0).is_some_and(|team| team.count == 1) {
            found.push(broken(plan, Code::CollectiveAlone, i, "a collective of one rank".into()));
        }
        let (reduced, as_mean, scatter) = match action {
            Action::AllGather { group, ranks, send, recv } => {
                if ranks.is_some_and(|n| !was_kept(plan, i, (*group, n), send)) {
                    let message = "gathers among a subset of ranks parts that they did not keep";
                    found.push(broken(plan, Code::KeptParts, i, message.into()));
                }
                if task.stream != Stream::Gather {
                    found.push(broken(
                        plan,
                        Code::CollectiveStreams,
                        i,
                        "a gather on another stream".into(),
                    ));
                }
                if !read_later(plan, i, recv.buffer) {
                    found.push(broken(
                        plan,
                        Code::GatheredUnread,
                        i,
                        "the gathered value is never read".into(),
                    ));
                }
                continue;
            }
            Action::ReduceScatter { group, reduce, send, .. } => {
                (Some(*group), *reduce == expected(plan, send), true)
            }
            Action::AllReduce { group, reduce, send, .. } => {
                (*group, *reduce == expected(plan, send), false)
            }
            _ => continue,
        };
        if task.stream != Stream::Reduce {
            found.push(broken(
                plan,
                Code::CollectiveStreams,
                i,
                "a reduction on another stream".into(),
            ));
        }
        let Some(group) = reduced else { continue };
        reductions[group][usize::from(!scatter)] += 1;
        let g = &plan.groups[group];
        if !g.trainable {
            found.push(broken(plan, Code::FrozenReduced, i, "a frozen group is reduced".into()));
        }
        if !as_mean {
            found.push(broken(
                plan,
                Code::ReductionMissing,
                i,
                "gradients are not combined as declared".into(),
            ));
        }
    }
    for (group, found_here) in plan.groups.iter().zip(reductions).filter(|(g, _)| g.trainable) {
        let shards = group.shards();
        let expected = [usize::from(shards > 1), usize::from(plan.world_size > shards)];
        if found_here != expected {
            let unit = &plan.units[group.unit].name;
            let [scatters, reduces] = found_here;
            let message = format!(
                "unit `{unit}`: gradients are scattered {scatters} and averaged {reduces} times, not {} \
                 and {}",
                expected[0], expected[1]
            );
            found.push(Diagnostic::error(Code::ReductionMissing, message));
        }
    }
}

/// Whether `send` of gather `i` among `ranks` is what each of them kept of its gathered group.
fn was_kept(plan: &Plan, i: TaskId, (group, ranks): (GroupId, usize), send: &Place) -> bool {
    let begin =
        plan.phases.iter().find(|p| p.range().contains(&i)).map_or(TaskId::FIRST, |p| p.begin);
    let last_writer = |before: TaskId, place: &Place| {
        let writes =
            |j: &TaskId| plan.tasks[*j].action.writes().iter().any(|p| p.buffer == place.buffer);
        begin.until(before).rev().find(writes)
    };
    let Some(kept) = last_writer(i, send) else { return false };
    let Action::Reshard { group: g, ranks: n, from, to } = &plan.tasks[kept].action else {
        return false;
    };
    if (*g, *n, to) != (group, ranks, send)
        || plan.units[plan.groups[group].unit].reshard != Some(*n)
    {
        return false;
    }
    let gathered = last_writer(kept, from).map(|j| &plan.tasks[j].action);
    matches!(gathered, Some(Action::AllGather { group: g, ranks: None, recv, .. })
        if *g == group && recv == from)
}

/// Whether a later task, of the same phase unless the buffer is kept, reads it before another gather writes
/// it.
fn read_later(plan: &Plan, gather: TaskId, buffer: BufferId) -> bool {
    let phase = plan.phases.iter().find(|p| p.range().contains(&gather));
    let end = match plan.buffers[buffer].arena {
        Arena::Persistent | Arena::Host => plan.tasks.next_key(),
        Arena::Workspace => phase.map_or(TaskId::FIRST, |p| p.end),
    };
    for task in &plan.tasks[gather.next()..end] {
        if task.action.reads().iter().any(|p| p.buffer == buffer) {
            return true;
        }
        if task.action.writes().iter().any(|p| p.buffer == buffer) {
            return false;
        }
    }
    false
}
