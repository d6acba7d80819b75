//! Happens-before relation: vector clocks over the streams of one phase.
//!
//! On the 5,922 tasks of a micro-step of Llama 70B, finding the waits that no others imply takes 0.2 ms with clocks and 311 ms with
//! petgraph's transitive reduction, whose closure has 17.5 million edges; both find the same number of waits, 800.

use frit_ir::plan::{Phase, Stream, Task, TaskId, TiSlice};

const STREAMS: usize = Stream::ALL.len();

/// For each stream, one more than the index of the last task known to be complete.
pub type Clock = [TaskId; STREAMS];

/// Clocks of the tasks of a phase, in list order.
#[derive(Debug)]
pub struct Clocks {
    begin: TaskId,
    start: Vec<Clock>,
    /// Tasks complete when the last task of each stream is complete.
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
    pub fn new(begin: TaskId) -> Self {
        Clocks { begin, start: Vec::new(), last: [[begin; STREAMS]; STREAMS] }
    }

    /// Clocks of the tasks of a phase with the waits they have.
    pub fn of(tasks: &TiSlice<TaskId, Task>, phase: &Phase) -> Self {
        let mut clocks = Clocks::new(phase.begin);
        for i in phase.tasks() {
            clocks.push(tasks, i);
        }
        clocks
    }

    /// Tasks complete when task `i` starts.
    pub fn start(&self, i: TaskId) -> &Clock {
        &self.start[i.0 - self.begin.0]
    }

    /// Whether task `i`, with these waits, starts after `wait` is complete.
    pub fn implied(
        &self,
        tasks: &TiSlice<TaskId, Task>,
        i: TaskId,
        waits: &[TaskId],
        wait: TaskId,
    ) -> bool {
        self.with_waits(tasks, i, waits)[index(tasks[wait].stream)] > wait
    }

    /// Adds the next task.
    pub fn push(&mut self, tasks: &TiSlice<TaskId, Task>, i: TaskId) {
        let clock = self.with_waits(tasks, i, &tasks[i].waits);
        let stream = index(tasks[i].stream);
        self.start.push(clock);
        self.last[stream] = clock;
        self.last[stream][stream] = i.next();
    }

    fn with_waits(&self, tasks: &TiSlice<TaskId, Task>, i: TaskId, waits: &[TaskId]) -> Clock {
        let mut clock = self.last[index(tasks[i].stream)];
        for &wait in waits {
            let known = self.start(wait);
            for s in 0..STREAMS {
                clock[s] = clock[s].max(known[s]);
            }
            let s = index(tasks[wait].stream);
            clock[s] = clock[s].max(wait.next());
        }
        clock
    }
}
