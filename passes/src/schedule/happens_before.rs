//! Happens-before relation: vector clocks over the streams of one phase.

use frit_ir::plan::{Stream, Task};

const STREAMS: usize = Stream::ALL.len();

/// For each stream, one more than the index of the last task known to be complete.
pub type Clock = [usize; STREAMS];

/// Clocks of the tasks of a phase, in list order.
#[derive(Debug)]
pub struct Clocks {
    begin: usize,
    start: Vec<Clock>,
    /// What is known when the last task of each stream is complete.
    last: [Clock; STREAMS],
}

/// Position of a stream in a [`Clock`].
pub fn index(stream: Stream) -> usize {
    match stream {
        Stream::Compute => 0,
        Stream::Gather => 1,
        Stream::Reduce => 2,
        Stream::CopyIn => 3,
        Stream::CopyOut => 4,
    }
}

impl Clocks {
    /// Clocks of a phase whose first task is `begin`; all before it is complete.
    pub fn new(begin: usize) -> Self {
        Clocks { begin, start: Vec::new(), last: [[begin; STREAMS]; STREAMS] }
    }

    /// Clocks of the tasks `begin..end` with the waits they have.
    pub fn of(tasks: &[Task], begin: usize, end: usize) -> Self {
        let mut clocks = Clocks::new(begin);
        for i in begin..end {
            clocks.push(tasks, i);
        }
        clocks
    }

    /// What is complete when task `i` starts.
    pub fn start(&self, i: usize) -> &Clock {
        &self.start[i - self.begin]
    }

    /// Whether task `i`, with these waits, starts after `wait` is complete.
    pub fn implied(&self, tasks: &[Task], i: usize, waits: &[usize], wait: usize) -> bool {
        self.with_waits(tasks, i, waits)[index(tasks[wait].stream)] > wait
    }

    /// Adds the next task.
    pub fn push(&mut self, tasks: &[Task], i: usize) {
        let clock = self.with_waits(tasks, i, &tasks[i].waits);
        let stream = index(tasks[i].stream);
        self.start.push(clock);
        self.last[stream] = clock;
        self.last[stream][stream] = i + 1;
    }

    fn with_waits(&self, tasks: &[Task], i: usize, waits: &[usize]) -> Clock {
        let mut clock = self.last[index(tasks[i].stream)];
        for &wait in waits {
            let known = self.start(wait);
            for s in 0..STREAMS {
                clock[s] = clock[s].max(known[s]);
            }
            let s = index(tasks[wait].stream);
            clock[s] = clock[s].max(wait + 1);
        }
        clock
    }
}
