//! Enqueues tasks on streams with exactly the plan's waits, for direct execution, graph capture and timing.

use super::command::Command;
use super::memory::{Memory, STREAMS};
use super::program::Program;
use frit_cuda::CudaError;
use frit_cuda::driver::{
    Address, Driver, EventHandle, OperationHandle, ProductHandle, StreamHandle,
};
use frit_ir::plan::{Plan, Stream, TaskId, TiVec};
use std::ops::Range;

/// The plan's streams and the events between them; those of copies to and from the host only if there are any.
pub(super) struct Issuer {
    /// By [`index`].
    pub(super) streams: [StreamHandle; STREAMS],
    /// Marks the end of a task that tasks of other streams wait for.
    ended: TiVec<TaskId, Option<EventHandle>>,
    /// Marks where the other streams leave the compute stream.
    fork: EventHandle,
    /// Mark where they come back.
    joins: [EventHandle; STREAMS],
    /// Where collectives leave the number of their task, one more, when they are done; none for one rank.
    progress: Option<*mut u8>,
    /// The GEMMs, by their index.
    pub(super) products: Vec<ProductHandle>,
    /// The operations of cuDNN, by their index.
    pub(super) operations: Vec<OperationHandle>,
}

/// Begin and end of each task, for a step that is timed.
pub(super) type Marks = TiVec<TaskId, (EventHandle, EventHandle)>;

impl Issuer {
    /// Streams and events for a plan.
    ///
    /// # Errors
    /// If they cannot be had.
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
            // A collective that waits behind the blocks of a large kernel holds up every rank.
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
            products: Vec::new(),
            operations: Vec::new(),
        })
    }

    /// The compute stream: work enqueued there is ordered with everything that is issued.
    pub(super) fn compute(&self) -> StreamHandle {
        self.streams[Stream::Compute.index()]
    }

    /// The collective after the one that was done last: the one that is waited for, if any is.
    pub(super) fn next_collective(&self, plan: &Plan) -> String {
        // SAFETY: four bytes, which the device may write at any time.
        let done = self.progress.map_or(0, |p| unsafe { p.cast::<u32>().read_volatile() });
        let (done, tasks) = (TaskId(done as usize), &plan.tasks);
        let mut order = done.until(tasks.next_key()).chain(TaskId::FIRST.until(done));
        let next = order.find(|i| tasks[*i].action.is_collective());
        next.map_or_else(|| "no collective".into(), |i| format!("collective `{}`", tasks[i].name))
    }

    /// Puts whole phases on their streams. Each phase begins when everything before it is done.
    ///
    /// # Errors
    /// The task that cannot be put there.
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
        // What was put there before this part is done when it begins, and its events may belong to another
        // graph. A wait for a task of the same stream needs nothing.
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
        for command in &program.commands[i] {
            self.command(driver, command, stream)?;
        }
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

    /// Puts one command on a stream.
    ///
    /// # Errors
    /// If the driver or a library refuses.
    pub(super) fn command(
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
            Command::Multiply { product, at } => {
                // SAFETY: as above.
                unsafe { driver.multiply(self.products[*product], *at, on) }
            }
            Command::Execute { operation, at, workspace } => {
                // SAFETY: as above.
                unsafe { driver.execute(self.operations[*operation], at, *workspace, on) }
            }
            Command::Fused { .. } | Command::Choice { .. } => {
                unreachable!("invariant: the program is settled")
            }
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
