//! Enqueues tasks on streams with exactly the plan's waits, for direct execution, graph capture and timing.

use super::command::Command;
use super::memory::{Memory, STREAMS};
use super::program::Program;
use frit_cuda::CudaError;
use frit_cuda::driver::{Address, Driver, EventHandle, GemmHandle, OperationHandle, StreamHandle};
use frit_ir::plan::{Plan, Stream, TaskId, TiVec};
use std::ops::Range;

/// The plan's streams and the events between them; those of copies to and from the host only if there are any.
pub(super) struct Issuer {
    /// By [`index`].
    pub(super) streams: [StreamHandle; STREAMS],
    /// Events at the end of tasks for which other streams wait.
    ended: TiVec<TaskId, Option<EventHandle>>,
    /// Event at which the other streams fork from the compute stream.
    fork: EventHandle,
    /// Events at which they join it again.
    joins: [EventHandle; STREAMS],
    /// Host memory where each collective stores its task number plus one when it completes; none for one rank.
    progress: Option<*mut u8>,
    /// The GEMMs, by their index.
    pub(super) problems: Vec<GemmHandle>,
    /// The operations of cuDNN, by their index.
    pub(super) operations: Vec<OperationHandle>,
}

/// Events at the begin and end of each task of a timed step.
pub(super) type Marks = TiVec<TaskId, (EventHandle, EventHandle)>;

impl Issuer {
    /// Streams and events for a plan.
    ///
    /// # Errors
    /// If they cannot be created.
    pub(super) fn new(driver: &impl Driver, plan: &Plan) -> Result<Issuer, CudaError> {
        let mut ended: TiVec<TaskId, _> = vec![None; plan.tasks.len()].into();
        for task in &plan.tasks {
            for &wait in &task.waits {
                if plan.tasks[wait].stream != task.stream && ended[wait].is_none() {
                    ended[wait] = Some(driver.create_event(false)?);
                }
            }
        }
        let event = || driver.create_event(false);
        let used = plan.streams();
        let (mut streams, mut joins) =
            ([StreamHandle::default(); STREAMS], [EventHandle::default(); STREAMS]);
        let copies = |s: &Stream| matches!(s, Stream::CopyIn | Stream::CopyOut);
        for stream in Stream::ALL.into_iter().filter(|s| !copies(s) || used.contains(s)) {
            // A collective that waits behind the blocks of a large kernel delays every rank.
            streams[stream.index()] = driver.create_stream(stream != Stream::Compute)?;
            joins[stream.index()] = event()?;
        }
        Ok(Issuer {
            streams,
            ended,
            fork: event()?,
            joins,
            progress: match plan.world_size {
                1 => None,
                _ => Some(driver.allocate_pinned(4)?),
            },
            problems: Vec::new(),
            operations: Vec::new(),
        })
    }

    /// The compute stream: work enqueued there is ordered with all tasks.
    pub(super) fn compute(&self) -> StreamHandle {
        self.streams[Stream::Compute.index()]
    }

    /// The collective after the last completed one: the one that ranks wait for, if any.
    pub(super) fn next_collective(&self, plan: &Plan) -> String {
        // SAFETY: four bytes, which the device may write at any time.
        let done = self.progress.map_or(0, |p| unsafe { p.cast::<u32>().read_volatile() });
        let (done, tasks) = (TaskId(done as usize), &plan.tasks);
        let mut order = done.until(tasks.next_key()).chain(TaskId::FIRST.until(done));
        let next = order.find(|i| tasks[*i].action.is_collective());
        next.map_or_else(|| "no collective".into(), |i| format!("collective `{}`", tasks[i].name))
    }

    /// Enqueues whole phases. Each phase begins when everything before it is complete.
    ///
    /// # Errors
    /// The task that cannot be enqueued.
    pub(super) fn issue(
        &self,
        driver: &impl Driver,
        plan: &Plan,
        program: &Program,
        memory: &Memory,
        tasks: Range<TaskId>,
        marks: Option<&Marks>,
    ) -> Result<(), (TaskId, CudaError)> {
        for phase in &plan.phases {
            let part = phase.begin.max(tasks.start)..phase.end.min(tasks.end);
            if !part.is_empty() {
                self.phase(driver, plan, program, memory, part, marks)?;
            }
        }
        if tasks.end == plan.tasks.next_key() {
            self.collect_metrics(driver, plan, memory).map_err(|e| (TaskId(tasks.end.0 - 1), e))?;
        }
        Ok(())
    }

    fn phase(
        &self,
        driver: &impl Driver,
        plan: &Plan,
        program: &Program,
        memory: &Memory,
        tasks: Range<TaskId>,
        marks: Option<&Marks>,
    ) -> Result<(), (TaskId, CudaError)> {
        let others: Vec<usize> = Stream::ALL
            .iter()
            .filter(|s| **s != Stream::Compute)
            .filter(|s| plan.tasks[tasks.clone()].iter().any(|t| t.stream == **s))
            .map(|s| s.index())
            .collect();
        let first = tasks.start;
        let fork = || -> Result<(), CudaError> {
            if !others.is_empty() {
                driver.record(self.fork, self.compute())?;
            }
            others.iter().try_for_each(|s| driver.wait(self.streams[*s], self.fork))
        };
        fork().map_err(|e| (first, e))?;
        for i in tasks.start.until(tasks.end) {
            let marks = marks.map(|marks| marks[i]);
            self.wait(driver, plan, &tasks, i)
                .and_then(|()| self.task(driver, plan, program, memory, i, marks))
                .map_err(|e| (i, e))?;
        }
        let join = |s: &usize| {
            driver.record(self.joins[*s], self.streams[*s])?;
            driver.wait(self.compute(), self.joins[*s])
        };
        others.iter().try_for_each(join).map_err(|e| (TaskId(tasks.end.0 - 1), e))
    }

    /// Makes a task's stream wait for the task's dependencies on other streams.
    fn wait(
        &self,
        driver: &impl Driver,
        plan: &Plan,
        part: &Range<TaskId>,
        i: TaskId,
    ) -> Result<(), CudaError> {
        let task = &plan.tasks[i];
        // Tasks of earlier parts are complete, and their events may belong to another graph. Tasks of the same stream
        // need no wait.
        let needed =
            |wait: &&TaskId| part.contains(wait) && plan.tasks[**wait].stream != task.stream;
        for wait in task.waits.iter().filter(needed) {
            if let Some(event) = self.ended[*wait] {
                driver.wait(self.streams[task.stream.index()], event)?;
            }
        }
        Ok(())
    }

    fn task(
        &self,
        driver: &impl Driver,
        plan: &Plan,
        program: &Program,
        memory: &Memory,
        i: TaskId,
        marks: Option<(EventHandle, EventHandle)>,
    ) -> Result<(), CudaError> {
        let task = &plan.tasks[i];
        let stream = self.streams[task.stream.index()];
        if let Some((begin, _)) = marks {
            driver.record(begin, stream)?;
        }
        self.commands(driver, &program.commands[i], stream)?;
        if let Some((_, end)) = marks {
            driver.record(end, stream)?;
        }
        if let Some(event) = self.ended[i] {
            driver.record(event, stream)?;
        }
        match self.progress {
            Some(progress) if task.action.is_collective() => {
                let mark = memory.marks + i.0 as Address * 4;
                // SAFETY: the pinned memory has four bytes and lives as long as the device.
                unsafe { driver.copy_out(progress, mark, 4, stream) }
            }
            _ => Ok(()),
        }
    }

    /// Enqueues commands on a stream, in order.
    ///
    /// # Errors
    /// If the driver or a library refuses.
    pub(super) fn commands(
        &self,
        driver: &impl Driver,
        commands: &[Command],
        on: StreamHandle,
    ) -> Result<(), CudaError> {
        commands.iter().try_for_each(|command| self.command(driver, command, on))
    }

    /// Enqueues one command on a stream.
    ///
    /// # Errors
    /// If the driver or a library refuses.
    fn command(
        &self,
        driver: &impl Driver,
        command: &Command,
        on: StreamHandle,
    ) -> Result<(), CudaError> {
        match command {
            Command::Launch { function, shape, arguments } => {
                // SAFETY: the arguments were bound to this kernel; the plan's check bounds all places.
                unsafe { driver.launch(*function, *shape, arguments, on) }
            }
            Command::Multiply { problem, at } => {
                // SAFETY: as above.
                unsafe { driver.multiply(self.problems[*problem], *at, on) }
            }
            Command::Execute { operation, at, workspace } => {
                // SAFETY: as above.
                unsafe { driver.execute(self.operations[*operation], at, *workspace, on) }
            }
            Command::Choice { .. } => unreachable!("invariant: the program is settled"),
            Command::Copy { to, from, bytes } => driver.copy(*to, *from, *bytes, on),
            Command::CopyIn { to, from, bytes } => {
                // SAFETY: the plan's check keeps the range within the pinned arena, which lives as long as
                // the device; the plan's events order all copies of it.
                unsafe { driver.copy_in(*to, *from, *bytes, on) }
            }
            Command::CopyOut { to, from, bytes } => {
                // SAFETY: as above.
                unsafe { driver.copy_out(*to, *from, *bytes, on) }
            }
            Command::Zero { at, bytes } => driver.zero(*at, *bytes, on),
            Command::Collective(collective) => driver.collective(collective, on),
        }
    }

    /// Collects the metrics before the next step overwrites them.
    fn collect_metrics(
        &self,
        driver: &impl Driver,
        plan: &Plan,
        memory: &Memory,
    ) -> Result<(), CudaError> {
        for (i, metric) in plan.metrics.iter().enumerate() {
            let to = memory.report + i as Address * 4;
            driver.copy(to, memory.place(plan, &metric.place), 4, self.compute())?;
        }
        Ok(())
    }
}
