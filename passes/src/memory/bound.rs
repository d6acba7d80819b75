//! The lower bound of the workspace: the largest sum of sizes that are live at one point of the
//! schedule. A buffer is live while a task runs if the events order an access before or at the task and
//! another at or after it. Shares nothing with the packing.

use frit_ir::plan::{Plan, Stream};
use std::collections::HashMap;

/// The bound in bytes for the workspace `buffers`, with `sizes` by buffer.
pub(super) fn live_peak(plan: &Plan, buffers: &[usize], sizes: &[usize]) -> usize {
    let reach = complete_before(plan);
    let stream =
        |i: usize| Stream::ALL.iter().position(|s| *s == plan.tasks[i].stream).unwrap_or(0);
    let mut accesses: HashMap<usize, Vec<usize>> = HashMap::new();
    let mut streams: [Vec<usize>; 3] = [const { Vec::new() }; 3];
    for (i, task) in plan.tasks.iter().enumerate() {
        streams[stream(i)].push(i);
        for place in task.action.reads().into_iter().chain(task.action.writes()) {
            accesses.entry(place.buffer).or_default().push(i);
        }
    }
    // Within a stream, what is complete before a task only grows: a buffer begins to live at one task of
    // each stream and ceases at a later one. Changes of the live bytes, by stream and position in it.
    let mut changes: [Vec<isize>; 3] = streams.each_ref().map(|tasks| vec![0; tasks.len() + 1]);
    for buffer in buffers {
        let Some(touching) = accesses.get(buffer) else { continue };
        for (tasks, changes) in streams.iter().zip(&mut changes) {
            let begun = |t: usize| touching.iter().any(|&a| a == t || reach[t][stream(a)] > a);
            let begin = tasks.partition_point(|&t| !begun(t));
            let needed = |t: usize| touching.iter().any(|&a| a == t || reach[a][stream(t)] > t);
            let end = tasks.partition_point(|&t| needed(t));
            if begin < end {
                changes[begin] += sizes[*buffer] as isize;
                changes[end] -= sizes[*buffer] as isize;
            }
        }
    }
    let peak = |changes: &Vec<isize>| {
        let running = changes.iter().scan(0, |live, change| {
            *live += change;
            Some(*live)
        });
        running.max().unwrap_or(0)
    };
    changes.iter().map(peak).max().unwrap_or(0).unsigned_abs()
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
