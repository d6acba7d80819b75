//! The update of offloaded state, group by group: copied in, updated, copied out.
//!
//! Tasks on the same buffers are moved together where no dependence prevents it, so that the optimizer step and the moving average share
//! copies. The next group's state is copied in before a group is updated: within the limit that `schedule` sets, two groups are on the
//! device at once.

use super::{Copies, redirect};
use frit_ir::plan::{BufferClass, BufferId, Place, Task};
use std::collections::{BTreeMap, HashMap};

/// Groups on the device at once.
const AHEAD: usize = 2;

/// Tasks one after the other, and the buffers on the host that they work on: whether each is changed.
#[derive(Default)]
struct Piece {
    tasks: Vec<Task>,
    hosts: BTreeMap<BufferId, bool>,
}

pub(super) fn with_copies(tasks: Vec<Task>, copies: &mut Copies<'_>) -> Vec<Task> {
    let pieces = pieces(tasks, copies);
    let needed = pieces.iter().filter(|p| !p.hosts.is_empty());
    let needed = needed.map(|p| (p.hosts.keys().copied().collect(), p.tasks[0].clone())).collect();
    let mut staging = Staging { copies, needed, on_device: Vec::new() };
    let mut made = staging.copy_in(0);
    let mut n_done = 0;
    for piece in pieces {
        if piece.hosts.is_empty() {
            made.extend(piece.tasks);
            continue;
        }
        made.extend(staging.copy_in(n_done));
        let on_device = staging.on_device[n_done].clone();
        let first = piece.tasks[0].clone();
        for mut task in piece.tasks {
            redirect(&mut task, &on_device);
            made.push(task);
        }
        for (host, _) in piece.hosts.into_iter().filter(|(_, changed)| *changed) {
            made.push(staging.copies.copy_out(host, on_device[&host], &first));
        }
        n_done += 1;
        made.extend(staging.copy_in(n_done));
    }
    made
}

/// The tasks in an order in which those of the same host buffers are adjacent.
fn pieces(tasks: Vec<Task>, copies: &Copies<'_>) -> Vec<Piece> {
    let mut pieces: Vec<Piece> = Vec::new();
    for task in tasks {
        let mut hosts = BTreeMap::new();
        for place in task.action.reads().into_iter().filter(|p| copies.is_on_host(p)) {
            hosts.entry(place.buffer).or_insert(false);
        }
        for place in task.action.writes().into_iter().filter(|p| copies.is_on_host(p)) {
            hosts.insert(place.buffer, true);
        }
        let unit = hosts.keys().map(|b| copies.hosted[b].0).min();
        let same = |p: &Piece| p.hosts.keys().any(|b| Some(copies.hosted[b].0) == unit);
        let earlier = pieces.iter().rposition(same).filter(|_| unit.is_some());
        let delayed = earlier.filter(|at| {
            let between = pieces[at + 1..].iter().flat_map(|p| &p.tasks);
            between.into_iter().all(|t| pieces[*at].tasks.iter().all(|e| !conflict(e, t)))
        });
        let mut piece = delayed.map(|at| pieces.remove(at)).unwrap_or_default();
        piece.tasks.push(task);
        for (host, changed) in hosts {
            *piece.hosts.entry(host).or_default() |= changed;
        }
        pieces.push(piece);
    }
    pieces
}

/// Whether the order of two tasks matters.
fn conflict(a: &Task, b: &Task) -> bool {
    let overlap = |x: &Place, y: &Place| {
        let end = |p: &Place| p.offset + p.ty.bytes();
        x.buffer == y.buffer && x.offset < end(y) && y.offset < end(x)
    };
    let writes_what_uses = |a: &Task, b: &Task| {
        let used = [b.action.reads(), b.action.writes()].concat();
        a.action.writes().iter().any(|x| used.iter().any(|y| overlap(x, y)))
    };
    writes_what_uses(a, b) || writes_what_uses(b, a)
}

/// Copied in so far.
struct Staging<'a, 'b> {
    copies: &'a mut Copies<'b>,
    /// The buffers of each piece that works on the host's, and its first task.
    needed: Vec<(Vec<BufferId>, Task)>,
    /// By such a piece: buffers of the device by those of the host.
    on_device: Vec<HashMap<BufferId, BufferId>>,
}

impl Staging<'_, '_> {
    /// Copies in the buffers of the next pieces once `n_done` are done, except those that an earlier piece still
    /// changes.
    fn copy_in(&mut self, n_done: usize) -> Vec<Task> {
        let mut made = Vec::new();
        let end = self.needed.len().min(n_done + AHEAD);
        for next in self.on_device.len()..end {
            let (hosts, first) = self.needed[next].clone();
            let before = n_done..self.on_device.len();
            if before.into_iter().any(|k| self.needed[k].0.iter().any(|b| hosts.contains(b))) {
                break;
            }
            let mut on_device = HashMap::new();
            for host in hosts {
                let device = self.copies.staging(host, BufferClass::OptimizerState);
                made.push(self.copies.copy_in(host, device, &first));
                on_device.insert(host, device);
            }
            self.on_device.push(on_device);
        }
        made
    }
}
