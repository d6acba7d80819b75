//! Assigns offsets to every buffer.
//!
//! In: a scheduled plan. Out: every buffer at an aligned offset of its arena. Workspace buffers share bytes where the schedule's events
//! order every access of one before the first access of the other; the peak is reported beside its lower bound, computed by [`bound`] from
//! the same events but not from the offsets. Persistent and host buffers are laid out sequentially.

mod bound;
mod lifetimes;
mod offsets;

use frit_ir::plan::{ALIGNMENT, Arena, BufferId, Plan, TiVec};

/// Assigns offsets and sizes the arenas.
pub fn assign(plan: &mut Plan) {
    let (mut persistent, mut host) = (0, 0);
    for buffer in &mut plan.buffers {
        let end = match buffer.arena {
            Arena::Persistent => &mut persistent,
            Arena::Host => &mut host,
            Arena::Workspace => continue,
        };
        buffer.offset = *end;
        *end += buffer.bytes.next_multiple_of(ALIGNMENT);
    }
    (plan.persistent_bytes, plan.host_bytes) = (persistent, host);
    let lifetimes = lifetimes::of(plan);
    let sizes: TiVec<BufferId, usize> =
        plan.buffers.iter().map(|b| b.bytes.next_multiple_of(ALIGNMENT)).collect();
    let workspace: Vec<BufferId> = plan
        .buffers
        .keys()
        .filter(|&b| plan.buffers[b].arena == Arena::Workspace && lifetimes[b].is_some())
        .collect();
    plan.workspace_lower_bound = bound::live_peak(plan, &workspace, &sizes);
    let offsets = offsets::assign(&workspace, &sizes, &lifetimes, plan.workspace_lower_bound);
    for (&buffer, &offset) in workspace.iter().zip(&offsets) {
        plan.buffers[buffer].offset = offset;
    }
    plan.workspace_bytes =
        workspace.iter().zip(&offsets).map(|(&b, &offset)| offset + sizes[b]).max().unwrap_or(0);
}
