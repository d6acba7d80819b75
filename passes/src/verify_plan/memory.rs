//! Verifies what bytes contain when they are read.
//!
//! P101  every byte is written before it is read, or is persistent
//! P102  bytes are read through the buffer through which they were written (no use after free)
//! P103  a write is ordered after every earlier access to the same bytes on another stream
//! P104  a read is ordered after the write whose value it reads
//!
//! The step is replayed twice, so that what one step leaves behind for the next is checked too. Phases run one after another.

use super::broken;
use frit_ir::plan::{Arena, BufferId, Phase, PhaseName, Place, Plan, Stream, TaskId};
use frit_ir::{Code, Diagnostic};
use std::collections::BTreeMap;

const STREAMS: usize = Stream::ALL.len();

/// For each stream, how many of its executions are known to be complete.
type Seen = [usize; STREAMS];

#[derive(Clone)]
struct Bytes {
    end: usize,
    buffer: Option<BufferId>,
    /// Stream and number of the last write.
    write: Option<(usize, usize)>,
    /// Number of the last read on each stream.
    reads: [Option<usize>; STREAMS],
}

/// Disjoint byte ranges of one arena, by first byte.
type Map = BTreeMap<usize, Bytes>;

/// Device memory that lives as long as the run and that does not, and host memory.
type Arenas = [Map; 3];

pub(super) fn verify(plan: &Plan, found: &mut Vec<Diagnostic>) {
    let mut arenas = Arenas::default();
    for (b, buffer) in plan.buffers.iter_enumerated() {
        if buffer.arena.outlives_step() && buffer.bytes > 0 {
            let end = buffer.offset + buffer.bytes;
            let whole = Bytes { end, buffer: Some(b), write: None, reads: [None; STREAMS] };
            arenas[position_of(buffer.arena)].insert(buffer.offset, whole);
        }
    }
    let mut clock = Replay { done: [0; STREAMS], known: [[0; STREAMS]; STREAMS] };
    for _ in 0..2 {
        for phase in &plan.phases {
            let runs =
                if phase.name == PhaseName::MicroStep { plan.accumulation.min(2) } else { 1 };
            for _ in 0..runs {
                clock.barrier();
                replay(plan, phase, &mut clock, &mut arenas, found);
                if !found.is_empty() {
                    return;
                }
            }
        }
    }
}

struct Replay {
    done: Seen,
    known: [Seen; STREAMS],
}

impl Replay {
    fn barrier(&mut self) {
        self.known = [self.done; STREAMS];
    }
}

fn position(stream: Stream) -> usize {
    match stream {
        Stream::Compute => 0,
        Stream::Gather => 1,
        Stream::Reduce => 2,
        Stream::CopyIn => 3,
        Stream::CopyOut => 4,
    }
}

fn position_of(arena: Arena) -> usize {
    match arena {
        Arena::Persistent => 0,
        Arena::Workspace => 1,
        Arena::Host => 2,
    }
}

fn replay(
    plan: &Plan,
    phase: &Phase,
    clock: &mut Replay,
    arenas: &mut Arenas,
    found: &mut Vec<Diagnostic>,
) {
    // What is known once a task of this phase is complete.
    let mut after: Vec<Seen> = Vec::new();
    for i in phase.tasks() {
        let task = &plan.tasks[i];
        let s = position(task.stream);
        let mut known = clock.known[s];
        for wait in &task.waits {
            for (k, a) in known.iter_mut().zip(after[wait.0 - phase.begin.0]) {
                *k = (*k).max(a);
            }
        }
        let number = clock.done[s];
        for place in task.action.reads() {
            access(plan, i, place, false, (s, number), &known, arenas, found);
        }
        for place in task.action.writes() {
            access(plan, i, place, true, (s, number), &known, arenas, found);
        }
        clock.done[s] += 1;
        known[s] = clock.done[s];
        clock.known[s] = known;
        after.push(known);
    }
}

#[expect(clippy::too_many_arguments, reason = "one access has this many sides")]
fn access(
    plan: &Plan,
    task: TaskId,
    place: &Place,
    write: bool,
    (stream, number): (usize, usize),
    known: &Seen,
    arenas: &mut Arenas,
    found: &mut Vec<Diagnostic>,
) {
    let buffer = &plan.buffers[place.buffer];
    let map = &mut arenas[position_of(buffer.arena)];
    let (begin, end) =
        (buffer.offset + place.offset, buffer.offset + place.offset + place.ty.bytes());
    split(map, begin);
    split(map, end);
    let mut at = begin;
    let ordered = |(s, n): (usize, usize)| s == stream || n < known[s];
    let name = &buffer.name;
    for (&first, bytes) in map.range_mut(begin..end) {
        if !write {
            if first > at {
                break;
            }
            if bytes.buffer != Some(place.buffer) {
                let other =
                    bytes.buffer.map_or("another buffer", |b| plan.buffers[b].name.as_str());
                let message = format!("reads `{name}` after its bytes were given to `{other}`");
                found.push(broken(plan, Code::UseAfterFree, task, message));
                return;
            }
            if bytes.write.is_some_and(|w| !ordered(w)) {
                let message = format!("reads `{name}` without waiting for what writes it");
                found.push(broken(plan, Code::ReadUnordered, task, message));
                return;
            }
            bytes.reads[stream] = Some(number);
        } else {
            let reads = bytes.reads.iter().enumerate().filter_map(|(s, n)| n.map(|n| (s, n)));
            if !reads.chain(bytes.write).all(ordered) {
                let message =
                    format!("overwrites bytes of `{name}` that another stream may still use");
                found.push(broken(plan, Code::WriteUnordered, task, message));
                return;
            }
        }
        at = bytes.end;
    }
    if write {
        let inside: Vec<usize> = map.range(begin..end).map(|(k, _)| *k).collect();
        for key in inside {
            map.remove(&key);
        }
        let write = Some((stream, number));
        if begin < end {
            let reads = [None; STREAMS];
            map.insert(begin, Bytes { end, buffer: Some(place.buffer), write, reads });
        }
    } else if at < end {
        let message = format!("reads {} of `{name}`, of which bytes were never written", place.ty);
        found.push(broken(plan, Code::ReadBeforeWrite, task, message));
    }
}

/// Makes `at` the border of two ranges if it is inside one.
fn split(map: &mut Map, at: usize) {
    let Some((_, bytes)) = map.range_mut(..at).next_back() else { return };
    if bytes.end > at {
        let rest = bytes.clone();
        bytes.end = at;
        map.insert(at, rest);
    }
}
