//! Offloaded parameters in passes that only read them.
//!
//! The shard that a gather sends is copied in for that gather, cast again if the gather has another dtype, and freed. Parameters that
//! kernels read directly are copied in for a window of the pass, from the first to the last reader between which fewer than [`OTHERS`]
//! other units are read: units at the end of forward stay until backward, all others are freed and copied in again.

use super::{Copies, redirect};
use frit_ir::plan::{Action, Arena, BufferClass, BufferId, Task, UnitId};
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};

/// Other units between two readers of a parameter for which it is freed in the meantime.
const OTHERS: usize = 2;

/// Readers of a host buffer, and of values computed from it alone.
struct Window {
    host: BufferId,
    /// By position, ascending.
    readers: Vec<usize>,
}

/// Kernels that read one buffer on the host and nothing else, and write one buffer of the workspace that only
/// this phase uses.
#[derive(Default)]
struct Made {
    /// The position of the task, by what it writes.
    by_result: BTreeMap<BufferId, usize>,
    positions: HashSet<usize>,
}

pub(super) fn with_copies(tasks: Vec<Task>, copies: &mut Copies<'_>) -> Vec<Task> {
    let made = made(&tasks, copies);
    let windows = windows(&tasks, &made, copies);
    let mut before: HashMap<usize, Vec<Task>> = HashMap::new();
    let mut moved: HashMap<usize, HashMap<BufferId, BufferId>> = HashMap::new();
    let mut taken: BTreeSet<BufferId> = BTreeSet::new();
    for window in windows {
        let first = &tasks[window.readers[0]];
        let device = copies.staging(window.host, BufferClass::Gathered);
        let mut inserted = vec![copies.copy_in(window.host, device, first)];
        let mut to = HashMap::from([(window.host, device)]);
        let read: BTreeSet<BufferId> =
            window.readers.iter().flat_map(|r| read(&tasks[*r])).collect();
        for (&result, &at) in made.by_result.iter().filter(|(result, _)| read.contains(result)) {
            let mut task = tasks[at].clone();
            if task.action.reads()[0].buffer != window.host {
                continue;
            }
            task.region = first.region;
            if !taken.insert(result) {
                // Made again, by the same work on the same values: the same task.
                let copy = copies.plan.buffers[result].clone();
                to.insert(result, copies.plan.buffers.push_and_get_key(copy));
            }
            redirect(&mut task, &to);
            inserted.push(task);
        }
        before.entry(window.readers[0]).or_default().extend(inserted);
        for reader in window.readers {
            moved.entry(reader).or_default().extend(&to);
        }
    }
    let mut all = Vec::with_capacity(tasks.len() + before.len());
    for (i, mut task) in tasks.into_iter().enumerate() {
        if made.positions.contains(&i) {
            continue;
        }
        all.extend(before.remove(&i).unwrap_or_default());
        if let Some(to) = moved.get(&i) {
            redirect(&mut task, to);
        }
        all.push(task);
    }
    all
}

fn read(task: &Task) -> Vec<BufferId> {
    task.action.reads().into_iter().map(|p| p.buffer).collect()
}

fn made(tasks: &[Task], copies: &Copies<'_>) -> Made {
    let mut n_writers: HashMap<BufferId, usize> = HashMap::new();
    for place in tasks.iter().flat_map(|t| t.action.writes()) {
        *n_writers.entry(place.buffer).or_default() += 1;
    }
    let mut made = Made::default();
    for (i, task) in tasks.iter().enumerate() {
        let Action::Kernel { reads, writes, .. } = &task.action else { continue };
        let ([read], [write]) = (&reads[..], &writes[..]) else { continue };
        let workspace = copies.plan.buffers[write.buffer].arena == Arena::Workspace;
        let apart = n_writers[&write.buffer] == 1 && !copies.across.contains(&write.buffer);
        if copies.is_on_host(read) && workspace && apart {
            made.by_result.insert(write.buffer, i);
            made.positions.insert(i);
        }
    }
    made
}

/// Readers of host buffers, and the lifetimes of their copies.
fn windows(tasks: &[Task], made: &Made, copies: &Copies<'_>) -> Vec<Window> {
    let mut windows: Vec<Window> = Vec::new();
    // Position and buffer on the host of everything that kernels read, in order.
    let mut readings: Vec<(usize, BufferId)> = Vec::new();
    for (i, task) in tasks.iter().enumerate() {
        if made.positions.contains(&i) {
            continue;
        }
        let host_of = |buffer: BufferId| match made.by_result.get(&buffer) {
            Some(&at) => Some(tasks[at].action.reads()[0].buffer),
            None => copies.hosted.contains_key(&buffer).then_some(buffer),
        };
        let hosts: BTreeSet<BufferId> = read(task).into_iter().filter_map(host_of).collect();
        match task.action {
            Action::AllGather { .. } => {
                windows.extend(hosts.iter().map(|&host| Window { host, readers: vec![i] }));
            }
            _ => readings.extend(hosts.iter().map(|&host| (i, host))),
        }
    }
    let mut open: BTreeMap<BufferId, (usize, Window)> = BTreeMap::new();
    for (n, &(i, host)) in readings.iter().enumerate() {
        let unit = |host: &BufferId| copies.hosted[host].0;
        let stays = open.get(&host).is_some_and(|(last, _)| {
            let others: BTreeSet<UnitId> =
                readings[last + 1..n].iter().map(|r| unit(&r.1)).collect();
            others.iter().filter(|u| **u != unit(&host)).count() < OTHERS
        });
        if !stays {
            let window = Window { host, readers: vec![] };
            windows.extend(open.insert(host, (n, window)).map(|(_, window)| window));
        }
        let (last, window) = open.get_mut(&host).expect("invariant: opened above");
        *last = n;
        window.readers.push(i);
    }
    windows.extend(open.into_values().map(|(_, window)| window));
    windows.sort_by_key(|w| w.readers[0]);
    windows
}
