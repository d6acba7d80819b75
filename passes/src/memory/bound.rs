//! The lower bound of the workspace: the largest sum of sizes that are live at one point of the
//! schedule. A buffer is live while a task runs if the events order an access before or at the task and
//! another at or after it. Shares nothing with the packing.

use frit_ir::plan::{Plan, Stream};
use std::collections::HashMap;

/// The bound in bytes for the workspace `buffers`, with `sizes` by buffer.
pub(super) fn live_peak(plan: &Plan, buffers: &[usize], sizes: &[usize]) -> usize {
    let reach = complete_before(plan);
    let mut accesses: HashMap<usize, Vec<usize>> = HashMap::new();
    for (i, task) in plan.tasks.iter().enumerate() {
        for place in task.action.reads().into_iter().chain(task.action.writes()) {
            accesses.entry(place.buffer).or_default().push(i);
        }
    }
    let stream =
        |i: usize| Stream::ALL.iter().position(|s| *s == plan.tasks[i].stream).unwrap_or(0);
    // Task a is complete before task b starts.
    let ordered = |a: usize, b: usize| reach[b][stream(a)] > a;
    let mut live = vec![0; plan.tasks.len()];
    for buffer in buffers {
        let Some(touching) = accesses.get(buffer) else { continue };
        for (t, bytes) in live.iter_mut().enumerate() {
            let begun = touching.iter().any(|&a| a == t || ordered(a, t));
            if begun && touching.iter().rev().any(|&a| a == t || ordered(t, a)) {
                *bytes += sizes[*buffer];
            }
        }
    }
    live.into_iter().max().unwrap_or(0)
}

/// For every task and stream, one more than the last task known to be complete when it starts.
fn complete_before(plan: &Plan) -> Vec<[usize; 3]> {
    let mut reach: Vec<[usize; 3]> = Vec::with_capacity(plan.tasks.len());
    for phase in &plan.phases {
        let mut previous: [Option<usize>; 3] = [None; 3];
        for i in phase.begin..phase.end {
            let s = Stream::ALL.iter().position(|s| *s == plan.tasks[i].stream).unwrap_or(0);
            let mut known = [phase.begin; 3];
            for j in previous[s].into_iter().chain(plan.tasks[i].waits.iter().copied()) {
                let t = Stream::ALL.iter().position(|s| *s == plan.tasks[j].stream).unwrap_or(0);
                for (k, r) in known.iter_mut().zip(reach[j]) {
                    *k = (*k).max(r);
                }
                known[t] = known[t].max(j + 1);
            }
            previous[s] = Some(i);
            reach.push(known);
        }
    }
    reach
}
