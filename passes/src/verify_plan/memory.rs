//! Verifies what bytes contain when they are read.
//!
//! P101  every byte is written before it is read, or is persistent
//! P102  bytes are read through the buffer through which they were written (no use after free)
//! P103  a write is ordered after every earlier access to the same bytes on another stream
//! P104  a read is ordered after the write whose value it reads
//!
//! The step is replayed twice, so that what one step leaves behind for the next is checked too. Phases run one after another.

use super::broken;
use frit_ir::plan::{Arena, BufferId, Phase, PhaseName, Place, Plan, Stream};
use frit_ir::{Code, Diagnostic};
use rangemap::RangeMap;
use std::ops::Range;

const STREAMS: usize = Stream::ALL.len();

/// For each stream, how many of its executions are known to be complete.
type Seen = [usize; STREAMS];

/// A stream, and the number of one of its executions.
type Execution = (usize, usize);

/// The state of the bytes of one arena.
#[derive(Default)]
struct Bytes {
    /// The buffer through which they were written last, and by which execution; none wrote what is there at first.
    written: RangeMap<usize, (BufferId, Option<Execution>)>,
    /// By stream, the last execution that has read them since.
    read: [RangeMap<usize, usize>; STREAMS],
}

/// A broken invariant.
type Problem = (Code, String);

/// Device memory that lives as long as the run and that does not, and host memory.
type Arenas = [Bytes; 3];

pub(super) fn verify(plan: &Plan, found: &mut Vec<Diagnostic>) {
    let mut arenas = Arenas::default();
    for (b, buffer) in plan.buffers.iter_enumerated() {
        if buffer.arena.outlives_step() && buffer.bytes > 0 {
            let range = buffer.offset..buffer.offset + buffer.bytes;
            arenas[position_of(buffer.arena)].written.insert(range, (b, None));
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
    // The tasks known to be complete once a task of this phase is.
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
        let reads = task.action.reads().into_iter().map(|place| (place, false));
        let writes = task.action.writes().into_iter().map(|place| (place, true));
        for (place, write) in reads.chain(writes) {
            let bytes = &mut arenas[position_of(plan.buffers[place.buffer].arena)];
            let accessed = match write {
                true => bytes.write(plan, place, (s, number), &known),
                false => bytes.read(plan, place, (s, number), &known),
            };
            if let Err((code, message)) = accessed {
                found.push(broken(plan, code, i, message));
            }
        }
        clock.done[s] += 1;
        known[s] = clock.done[s];
        clock.known[s] = known;
        after.push(known);
    }
}

/// Whether an execution is complete before one on `stream` that knows this much.
fn is_ordered((s, n): Execution, stream: usize, known: &Seen) -> bool {
    s == stream || n < known[s]
}

fn range(plan: &Plan, place: &Place) -> Range<usize> {
    let begin = plan.buffers[place.buffer].offset + place.offset;
    begin..begin + place.ty.bytes()
}

impl Bytes {
    fn read(
        &mut self,
        plan: &Plan,
        place: &Place,
        (stream, number): Execution,
        known: &Seen,
    ) -> Result<(), Problem> {
        let (range, name) = (range(plan, place), &plan.buffers[place.buffer].name);
        if range.is_empty() {
            return Ok(());
        }
        for (_, (buffer, write)) in self.written.overlapping(&range) {
            if *buffer != place.buffer {
                let other = &plan.buffers[*buffer].name;
                let message = format!("reads `{name}` after its bytes were given to `{other}`");
                return Err((Code::UseAfterFree, message));
            }
            if write.is_some_and(|write| !is_ordered(write, stream, known)) {
                let message = format!("reads `{name}` without waiting for what writes it");
                return Err((Code::ReadUnordered, message));
            }
        }
        if self.written.gaps(&range).next().is_some() {
            let ty = &place.ty;
            let message = format!("reads {ty} of `{name}`, some bytes of which were never written");
            return Err((Code::ReadBeforeWrite, message));
        }
        self.read[stream].insert(range, number);
        Ok(())
    }

    fn write(
        &mut self,
        plan: &Plan,
        place: &Place,
        (stream, number): Execution,
        known: &Seen,
    ) -> Result<(), Problem> {
        let range = range(plan, place);
        if range.is_empty() {
            return Ok(());
        }
        let writes = self.written.overlapping(&range).filter_map(|(_, (_, write))| *write);
        let reads = self.read.iter().enumerate();
        let reads = reads.flat_map(|(s, read)| read.overlapping(&range).map(move |(_, n)| (s, *n)));
        if !writes.chain(reads).all(|earlier| is_ordered(earlier, stream, known)) {
            let name = &plan.buffers[place.buffer].name;
            let message = format!("overwrites bytes of `{name}` that another stream may still use");
            return Err((Code::WriteUnordered, message));
        }
        self.read.iter_mut().for_each(|read| read.remove(range.clone()));
        self.written.insert(range, (place.buffer, Some((stream, number))));
        Ok(())
    }
}
