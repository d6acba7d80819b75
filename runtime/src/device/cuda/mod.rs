//! NVIDIA GPUs: one rank per process. The first execution of a part of a step enqueues its tasks one by one; the second is
//! captured into a CUDA graph; from then on the part is one graph launch. The host never waits for a step: copies of inputs
//! and metrics overlap with it.

mod bench;
mod ceilings;
mod choose;
mod command;
mod cubins;
pub mod doctor;
mod feed;
mod issue;
mod measure;
mod memory;
mod modules;
mod open;
mod operands;
mod program;
mod random_data;
mod reports;
#[cfg(test)]
mod shared_caches;
mod sums;
mod survey;
mod tuning;
mod widen;

pub use ceilings::Ceilings;
pub use cubins::CACHE_VARIABLE;
pub use frit_comm::launch::TIMEOUT_VARIABLE;
pub use tuning::{ChoiceTimes, times};

use super::{Device, Span, launches_of_step};
use crate::RunError;
use crate::plan_dir::PlanDir;
use crate::usage::Usage;
use choose::Choice;
use command::Command;
use cubins::Cubins;
use feed::Feed;
use frit_comm::CommError;
use frit_comm::rendezvous::Rendezvous;
use frit_cuda::CudaError;
use frit_cuda::driver::{
    Address, Collective, Driver, EventHandle, Exchange, GraphHandle, Properties, StreamHandle,
    TeamHandle,
};
use frit_data::Element;
use frit_ir::DType;
use frit_ir::plan::{BufferId, DeviceType, Plan, TaskId};
use issue::{Issuer, Marks};
use memory::Memory;
use modules::Modules;
use program::Program;
use reports::Reports;
use std::cell::{Cell, RefCell};
use std::ops::Range;
use std::rc::Rc;
use std::time::{Duration, Instant};
use survey::Survey;

/// Number of polls without sleeping, then the sleep between polls.
const POLLS: usize = 2000;
const POLL_PAUSE: Duration = Duration::from_micros(50);

/// Bytes that a rank of a plan for GPUs allocates outside the plan's arenas: scratch memory of launches, workspace of
/// GEMMs, data in transit. Selected cuDNN engines may need more.
///
/// # Errors
/// A kernel that has no code for GPUs.
pub fn extra_bytes(plan: &Plan) -> Result<usize, RunError> {
    let survey = Survey::of(plan)?;
    Ok(Memory::layout(plan, &[0; memory::STREAMS], survey.faulting.len()).extra_bytes(plan))
}

/// A rank and its connections to the others.
pub struct Ranks {
    /// This one.
    pub rank: usize,
    /// The connections to the other ranks, which are watched, if they are other processes.
    pub rendezvous: Option<Rendezvous>,
    /// How long a rank waits for the others.
    pub timeout: Duration,
}

/// Seconds for which the first start measures candidates unless told otherwise; of a reproducible plan none.
pub const TUNING_SECONDS: u64 = 120;

/// What preparing a plan may take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Time for measuring candidates of kernels, if it was said.
    pub tuning: Option<Duration>,
    /// Device memory that is left to others, such as a plan beside it, in bytes.
    pub reserved_bytes: usize,
}

impl Limits {
    /// Those of a plan that is alone, and `seconds` for measuring.
    pub fn of(seconds: Option<u64>) -> Limits {
        Limits { tuning: seconds.map(Duration::from_secs), reserved_bytes: 0 }
    }

    /// Time for measuring. What is measured depends on the moment: unless it is said, a reproducible plan does not.
    fn tuning(&self, plan: &Plan) -> Duration {
        let usual = if plan.reproducible.is_some() { 0 } else { TUNING_SECONDS };
        self.tuning.unwrap_or(Duration::from_secs(usual))
    }
}

/// How far a part of a step is prepared.
enum Part {
    /// It has run once, task by task.
    Warm,
    /// It is a captured graph.
    Captured(GraphHandle),
}

/// One rank on a GPU.
pub struct Cuda<'a, D> {
    plan: &'a Plan,
    driver: Rc<D>,
    ranks: Rc<Ranks>,
    limits: Limits,
    turns: Rc<Turns>,
    ready: Ready,
    parts: Vec<(Range<TaskId>, Part)>,
}

/// Whose turn on the GPU it is. Plans beside each other share communicators, of which every rank must start the collectives in
/// one order. The host alone does not keep it: a rank that receives nothing of a gather does not wait for its end.
struct Turns {
    /// The compute stream of the plan that was last.
    last: Cell<StreamHandle>,
    /// The end of its work.
    ended: EventHandle,
}

impl Turns {
    /// Makes what a plan puts on its streams next wait for all work of the plan before, which has joined that one's compute
    /// stream.
    fn take(&self, driver: &impl Driver, compute: StreamHandle) -> Result<(), CudaError> {
        let last = self.last.replace(compute);
        if last == compute {
            return Ok(());
        }
        driver.record(self.ended, last)?;
        driver.wait(compute, self.ended)
    }
}

/// A prepared plan.
struct Ready {
    memory: Memory,
    program: Program,
    issuer: Issuer,
    feed: RefCell<Feed>,
    reports: Reports,
    /// Tasks that may report a fault.
    faulting: Vec<TaskId>,
    /// An event for reads.
    idle: EventHandle,
    /// What people should know of its preparation.
    note: Option<String>,
}

impl Ranks {
    /// Reports to the other ranks why this one stops.
    fn fail(&self, error: &RunError) {
        if let Some(rendezvous) = &self.rendezvous {
            rendezvous.fail(&format!("rank {} stopped: {error}", self.rank));
        }
    }
}

impl Ready {
    fn new<D: Driver>(
        dir: &PlanDir,
        driver: &D,
        ranks: &Ranks,
        limits: &Limits,
    ) -> Result<Ready, RunError> {
        let plan = &dir.plan;
        if plan.target.device != DeviceType::Cuda {
            return Err(RunError::Device { device: plan.target.device });
        }
        check_architecture(plan, driver.properties())?;
        let survey = Survey::of(plan)?;
        let mut issuer = Issuer::new(driver, plan)?;
        let n_faults = survey.faulting.len();
        let file = plan.object.as_ref().map_or("", |o| o.file.as_str());
        let ptx = dir.ptx.as_deref().map(|text| (file, text));
        let modules = Modules::load(&survey, driver, ptx, &Cubins::of(&dir.path))?;
        let choice = Choice::make(dir, &survey, driver, &modules, &mut issuer, (ranks, limits))?;
        let engines = choice.engines_bytes;
        let memory = Memory::allocate(driver, plan, &engines, n_faults, issuer.compute())?;
        let mut program = Program::bind(plan, &survey, driver, &memory, &modules, ranks.rank)?;
        choice.settle(driver, &mut program, &mut issuer)?;
        let marks: Vec<u8> = (1..=plan.tasks.len() as u32).flat_map(u32::to_le_bytes).collect();
        let idle = driver.create_event(false)?;
        // SAFETY: the bytes live until the copy was made.
        unsafe { driver.copy_in(memory.marks, marks.as_ptr(), marks.len(), issuer.compute())? };
        driver.record(idle, issuer.compute())?;
        // Memory must be zero before inputs arrive on another stream.
        Watch { driver, ranks }.wait(idle, || "setting memory to zero".into())?;
        let feed = RefCell::new(Feed::new(driver, plan, &memory, Cubins::of(&dir.path))?);
        let steps = <Cuda<'_, D> as Device>::METRICS_DELAY + 1;
        let reports = Reports::new(driver, plan, &memory, n_faults, steps)?;
        let (faulting, note) = (survey.faulting, choice.note);
        Ok(Ready { memory, program, issuer, feed, reports, faulting, idle, note })
    }
}

impl<'a, D: Driver> Cuda<'a, D> {
    /// Prepares a plan to run: memory, code, the algorithm of every GEMM.
    ///
    /// # Errors
    /// If the plan is for another device, or the device cannot do what the plan needs.
    pub fn new(
        dir: &'a PlanDir,
        driver: D,
        ranks: Ranks,
        limits: Limits,
    ) -> Result<Self, RunError> {
        let (driver, ranks) = (Rc::new(driver), Rc::new(ranks));
        let prepare = || -> Result<_, RunError> {
            let ready = Ready::new(dir, &*driver, &ranks, &limits)?;
            Ok((ready, driver.create_event(false)?))
        };
        let (ready, ended) = prepare().inspect_err(|e| ranks.fail(e))?;
        let turns = Rc::new(Turns { last: Cell::new(ready.issuer.compute()), ended });
        Ok(Cuda { plan: &dir.plan, driver, ranks, limits, turns, ready, parts: Vec::new() })
    }

    /// Prepares another plan on the same GPU, with separate memory, streams and graphs. Because they share communicators,
    /// the plans take turns on the GPU, in the order in which the host runs them. All ranks must call it.
    ///
    /// # Errors
    /// As [`Cuda::new`].
    pub fn beside<'b>(&self, dir: &'b PlanDir) -> Result<Cuda<'b, D>, RunError> {
        let limits = Limits { reserved_bytes: 0, ..self.limits };
        let ready = Ready::new(dir, &*self.driver, &self.ranks, &limits)
            .inspect_err(|e| self.ranks.fail(e))?;
        Ok(Cuda {
            plan: &dir.plan,
            driver: Rc::clone(&self.driver),
            ranks: Rc::clone(&self.ranks),
            limits,
            turns: Rc::clone(&self.turns),
            ready,
            parts: Vec::new(),
        })
    }

    /// The compute stream, once it is this plan's turn: work enqueued there comes after that of the plan beside it.
    fn in_turn(&self) -> Result<StreamHandle, CudaError> {
        let compute = self.ready.issuer.compute();
        self.turns.take(&*self.driver, compute)?;
        Ok(compute)
    }

    /// This rank.
    pub fn rank(&self) -> usize {
        self.ranks.rank
    }

    /// Reports to the other ranks why this one stops.
    pub fn fail(&self, error: &RunError) {
        self.ranks.fail(error);
        self.driver.abort();
    }

    /// Waits until all ranks are done.
    ///
    /// # Errors
    /// If one fails at the end.
    pub fn finish(self) -> Result<(), RunError> {
        let Some(rendezvous) = &self.ranks.rendezvous else { return Ok(()) };
        Ok(rendezvous.finish()?)
    }

    /// The driver.
    pub fn driver(&self) -> &D {
        &self.driver
    }

    fn issue(&self, tasks: Range<TaskId>, marks: Option<&Marks>) -> Result<(), RunError> {
        let (plan, rank) = (self.plan, self.ranks.rank);
        self.ready
            .issuer
            .issue(&*self.driver, plan, &self.ready.program, &self.ready.memory, tasks, marks)
            .map_err(|(task, e)| {
                let task = plan.tasks[task].name.clone();
                RunError::Task { task, rank, reason: e.to_string() }
            })
    }

    /// Makes the host wait for an event, unless another rank fails.
    fn wait(&self, event: EventHandle) -> Result<(), RunError> {
        let watch = Watch { driver: &*self.driver, ranks: &self.ranks };
        watch.wait(event, || self.ready.issuer.next_collective(self.plan))
    }

    fn address(&self, buffer: BufferId, offset: usize, bytes: usize) -> Address {
        let spec = &self.plan.buffers[buffer];
        assert!(offset + bytes <= spec.bytes, "access beyond buffer `{}`", spec.name);
        self.ready.memory.buffer(self.plan, buffer, offset)
    }

    /// Waits until all enqueued work is complete.
    fn rest(&self) -> Result<(), RunError> {
        let compute = self.ready.issuer.compute();
        self.ready.feed.borrow_mut().deliver(&*self.driver, compute)?;
        self.driver.record(self.ready.idle, compute)?;
        self.wait(self.ready.idle)
    }

    /// The bytes of a buffer in host memory, once all enqueued work is complete; `None` if it is in device memory.
    fn on_host(
        &self,
        buffer: BufferId,
        offset: usize,
        bytes: usize,
    ) -> Result<Option<*mut u8>, RunError> {
        let spec = &self.plan.buffers[buffer];
        assert!(offset + bytes <= spec.bytes, "access beyond buffer `{}`", spec.name);
        let Some(at) = self.ready.memory.on_host(self.plan, buffer, offset) else {
            return Ok(None);
        };
        self.rest()?;
        Ok(Some(at))
    }

    /// Copies device memory to the host and waits for it.
    fn fetch(&self, from: Address, to: &mut [u8]) -> Result<(), RunError> {
        let compute = self.ready.issuer.compute();
        // A copy would wait without noticing the failure of another rank.
        self.rest()?;
        if !to.is_empty() {
            // SAFETY: `to` has this size, and is borrowed until the copy was made.
            unsafe { self.driver.copy_out(to.as_mut_ptr(), from, to.len(), compute)? };
            self.driver.record(self.ready.idle, compute)?;
            self.wait(self.ready.idle)?;
        }
        Ok(())
    }
}

/// Waiting on the host.
struct Watch<'a, D> {
    driver: &'a D,
    ranks: &'a Ranks,
}

impl<D: Driver> Watch<'_, D> {
    fn wait(&self, event: EventHandle, stuck: impl Fn() -> String) -> Result<(), RunError> {
        let started = Instant::now();
        let mut polls = 0;
        while !self.driver.reached(event)? {
            polls += 1;
            if polls < POLLS {
                std::hint::spin_loop();
                continue;
            }
            std::thread::sleep(POLL_PAUSE);
            let rank = self.ranks.rank;
            let told = self.ranks.rendezvous.as_ref().and_then(Rendezvous::failure);
            let noticed = told.or_else(|| self.driver.communication_error());
            let late = started.elapsed() > self.ranks.timeout && self.ranks.rendezvous.is_some();
            let reason = match noticed {
                Some(reason) => reason,
                None if late => {
                    format!("the others did not arrive within {} s", self.ranks.timeout.as_secs())
                }
                None => continue,
            };
            let reason = format!("rank {rank} stopped in {}: {reason}", stuck());
            if let Some(rendezvous) = &self.ranks.rendezvous {
                rendezvous.fail(&reason);
            }
            self.driver.abort();
            return Err(CommError::from(reason).into());
        }
        Ok(())
    }
}

/// Refuses a device that is older than the plan's code, or of another architecture if the code is
/// architecture-specific.
fn check_architecture(plan: &Plan, properties: &Properties) -> Result<(), CudaError> {
    let (major, minor) = properties.capability;
    let text = plan.target.arch.trim_start_matches("sm_");
    let exact = text.ends_with('a');
    let wanted: u32 = text.trim_end_matches('a').parse().unwrap_or(u32::MAX);
    let found = major * 10 + minor;
    if found < wanted || (exact && found != wanted) {
        let (arch, name) = (plan.target.arch.clone(), properties.name.clone());
        return Err(CudaError::Architecture { arch, name, capability: (major, minor) });
    }
    Ok(())
}

impl<D: Driver> Device for Cuda<'_, D> {
    const METRICS_DELAY: usize = 1;

    fn feed(&mut self, buffer: BufferId, element: Element, bytes: &[u8]) -> Result<(), RunError> {
        let watch = Watch { driver: &*self.driver, ranks: &self.ranks };
        let wait = |event| watch.wait(event, || "the copy of an input".into());
        self.ready.feed.get_mut().take(&*self.driver, buffer, (element, bytes), wait)
    }

    fn run(&mut self, tasks: Range<TaskId>) -> Result<(), RunError> {
        let compute = self.in_turn()?;
        self.ready.feed.get_mut().deliver(&*self.driver, compute)?;
        match self.parts.iter().position(|(range, _)| *range == tasks) {
            // Libraries initialize in a first run, which cannot be captured.
            None => {
                self.issue(tasks.clone(), None)?;
                self.parts.push((tasks, Part::Warm));
            }
            Some(i) => {
                if let Part::Warm = self.parts[i].1 {
                    self.driver.begin_capture(compute)?;
                    self.issue(tasks, None)?;
                    self.parts[i].1 = Part::Captured(self.driver.end_capture(compute)?);
                }
                if let Part::Captured(graph) = self.parts[i].1 {
                    self.driver.launch_graph(graph, compute)?;
                }
            }
        }
        Ok(())
    }

    fn trace(&mut self, tasks: Range<TaskId>) -> Result<Vec<Span>, RunError> {
        let compute = self.in_turn()?;
        let event = || self.driver.create_event(true);
        let marks: Marks = self
            .plan
            .tasks
            .keys()
            .map(|i| match tasks.contains(&i) {
                true => Ok((event()?, event()?)),
                false => Ok((EventHandle::default(), EventHandle::default())),
            })
            .collect::<Result<_, CudaError>>()?;
        let origin = self.driver.create_event(true)?;
        self.ready.feed.get_mut().deliver(&*self.driver, compute)?;
        self.driver.record(origin, compute)?;
        self.issue(tasks.clone(), Some(&marks))?;
        self.driver.record(self.ready.idle, compute)?;
        self.wait(self.ready.idle)?;
        let span = |task: TaskId| -> Result<Span, RunError> {
            let (begin, end) = marks[task];
            let start_us = self.driver.elapsed_us(origin, begin)?;
            Ok(Span { task, start_us, duration_us: self.driver.elapsed_us(begin, end)? })
        };
        tasks.start.until(tasks.end).map(span).collect()
    }

    fn note_metrics(&mut self) -> Result<(), RunError> {
        Ok(self.ready.reports.note(&*self.driver, self.ready.issuer.compute())?)
    }

    fn take_metrics(&mut self) -> Result<Vec<f32>, RunError> {
        let watch = Watch { driver: &*self.driver, ranks: &self.ranks };
        let stuck = || self.ready.issuer.next_collective(self.plan);
        let report =
            self.ready.reports.take(self.plan.metrics.len(), |event| watch.wait(event, stuck))?;
        if let Some((task, at, size)) = report.fault {
            let task = self.plan.tasks[self.ready.faulting[task]].name.clone();
            let reason = format!("index {at} is outside of an axis of {size}");
            return Err(RunError::Task { task, rank: self.ranks.rank, reason });
        }
        Ok(report.metrics)
    }

    fn write(&mut self, buffer: BufferId, offset: usize, bytes: &[u8]) -> Result<(), RunError> {
        if let Some(to) = self.on_host(buffer, offset, bytes.len())? {
            // SAFETY: the range is within the buffer, which is within its arena; nothing copies meanwhile.
            unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len()) };
            return Ok(());
        }
        let to = self.address(buffer, offset, bytes.len());
        if bytes.is_empty() {
            return Ok(());
        }
        // SAFETY: the bytes are borrowed until the copy was made.
        unsafe {
            self.driver.copy_in(to, bytes.as_ptr(), bytes.len(), self.ready.issuer.compute())?
        };
        self.rest()
    }

    fn read(&self, buffer: BufferId, offset: usize, bytes: usize) -> Result<Vec<u8>, RunError> {
        if let Some(from) = self.on_host(buffer, offset, bytes)? {
            // SAFETY: as in `write`.
            return Ok(unsafe { std::slice::from_raw_parts(from, bytes) }.to_vec());
        }
        let mut out = vec![0; bytes];
        self.fetch(self.address(buffer, offset, bytes), &mut out)?;
        Ok(out)
    }

    fn gather(&self, buffer: BufferId, offset: usize, bytes: usize) -> Result<Vec<u8>, RunError> {
        let ranks = self.plan.world_size;
        if ranks == 1 {
            return self.read(buffer, offset, bytes);
        }
        let (exchange, room) = self.ready.memory.exchange;
        let most = room / ranks;
        let on_host = self.on_host(buffer, offset, bytes)?;
        let compute = self.in_turn()?;
        let mut all = vec![0; if self.ranks.rank == 0 { bytes * ranks } else { 0 }];
        for begin in (0..bytes).step_by(most) {
            let len = most.min(bytes - begin);
            let send = match on_host {
                None => self.address(buffer, offset + begin, len),
                Some(from) => {
                    // This rank's part of the received bytes.
                    let send = exchange + (self.ranks.rank * len) as Address;
                    // SAFETY: the range is within the buffer, and nothing else copies meanwhile.
                    unsafe { self.driver.copy_in(send, from.add(begin), len, compute)? };
                    send
                }
            };
            let gather = Collective {
                exchange: Exchange::AllGather,
                team: TeamHandle::default(),
                send,
                recv: exchange,
                count: len,
                dtype: DType::U8,
            };
            self.driver.collective(&gather, compute)?;
            if self.ranks.rank == 0 {
                let mut part = vec![0; len * ranks];
                self.fetch(exchange, &mut part)?;
                for (rank, part) in part.chunks(len).enumerate() {
                    all[rank * bytes + begin..][..len].copy_from_slice(part);
                }
            }
        }
        Ok(all)
    }

    fn note(&self) -> Option<&str> {
        self.ready.note.as_deref()
    }

    fn largest(&self, value: u64) -> Result<u64, RunError> {
        let Some(rendezvous) = &self.ranks.rendezvous else { return Ok(value) };
        Ok(rendezvous.largest(value)?)
    }

    fn memory_in_use(&self) -> Option<u64> {
        // A device that failed says so when it is asked for the next step.
        self.driver.memory().ok().map(|(free, total)| (total - free) as u64)
    }

    fn usage(&self) -> Result<Usage, RunError> {
        let Ready { memory, program, .. } = &self.ready;
        let (persistent_bytes, workspace_bytes) =
            (self.plan.persistent_bytes, self.plan.workspace_bytes);
        let (free, total) = self.driver.memory()?;
        let of_task = |task: TaskId| program.commands[task].iter().map(Command::kind).collect();
        Ok(Usage {
            device: self.driver.properties().name.clone(),
            persistent_bytes,
            workspace_bytes,
            host_bytes: self.plan.host_bytes,
            extra_bytes: memory.extra_bytes(self.plan),
            device_bytes: Some(total - free),
            launches: launches_of_step(self.plan, of_task),
            graph_launches: Some(self.plan.accumulation),
        })
    }
}
