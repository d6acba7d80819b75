//! The CPU device: all arenas in host memory; tasks run in plan order, each split over the rank's threads.

mod arena;
mod call;
mod routine;

use super::{Device, Span, launches_of_step};
use crate::RunError;
use crate::memory;
use crate::plan_dir::PlanDir;
use crate::usage::Usage;
use arena::Arenas;
use frit_comm::{CommError, Communicator};
use frit_data::{Element, convert};
use frit_ir::interpret;
use frit_ir::plan::{
    Action, BufferId, DeviceType, Entry, Kernel, KernelId, Metric, Place, TaskId, TiVec, layout,
};
use frit_ir::{Graph, Tensor};
use frit_kernels::pool::Pool;
use frit_kernels::routine::Operand;
use std::collections::{HashMap, VecDeque};
use std::ops::Range;
use std::time::Instant;

/// A prepared kernel.
enum Code<'a> {
    Generated { function: call::Function, extent: usize, grain: usize },
    Routine(Box<routine::Ready>),
    Interpreted(&'a Graph),
}

/// One rank on the CPU.
pub struct Cpu<'a, C> {
    plan: &'a PlanDir,
    comm: C,
    pool: Pool,
    arenas: Arenas,
    code: TiVec<KernelId, Code<'a>>,
    metrics: VecDeque<Vec<f32>>,
}

impl<'a, C: Communicator> Cpu<'a, C> {
    /// Prepares a plan to run; `interpret` executes every body with the IR interpreter.
    ///
    /// # Errors
    /// If the plan is for another device, the object file lacks a kernel, or there is too little memory.
    pub fn new(
        plan: &'a PlanDir,
        comm: C,
        threads: usize,
        interpret: bool,
    ) -> Result<Self, RunError> {
        if plan.plan.target.device != DeviceType::Cpu {
            let device = plan.plan.target.device;
            return Err(RunError::Device { device });
        }
        let code: Result<TiVec<_, _>, _> =
            plan.plan.kernels.iter().map(|k| prepare(plan, k, interpret)).collect();
        let arenas = Arenas::new(&plan.plan)?;
        let (pool, metrics) = (Pool::new(threads), VecDeque::new());
        Ok(Cpu { plan, comm, pool, arenas, code: code?, metrics })
    }

    fn pointer(&self, place: &Place) -> *mut u8 {
        self.arenas.pointer(&self.plan.plan.buffers[place.buffer], place.offset)
    }

    fn bytes(&self, buffer: BufferId, offset: usize, bytes: usize) -> &[u8] {
        let buffer = &self.plan.plan.buffers[buffer];
        assert!(offset + bytes <= buffer.bytes, "read beyond buffer `{}`", buffer.name);
        let from = self.arenas.pointer(buffer, offset);
        // SAFETY: the range is within the buffer, which is within its arena; nothing runs meanwhile.
        unsafe { std::slice::from_raw_parts(from, bytes) }
    }

    fn run_task(&self, i: TaskId) -> Result<(), RunError> {
        let task = &self.plan.plan.tasks[i];
        self.task(&task.action).map_err(|reason| {
            self.comm.abort();
            RunError::Task { task: task.name.clone(), rank: self.comm.rank(), reason }
        })
    }

    fn task(&self, action: &Action) -> Result<(), String> {
        let aborted = |e: CommError| e.to_string();
        let team = || {
            let team = self.plan.plan.team(action, self.comm.rank());
            team.expect("invariant: every collective has a team")
        };
        match action {
            Action::Kernel { kernel, reads, writes } => self.kernel(*kernel, reads, writes),
            Action::AllGather { send, recv, .. } => {
                let bytes = send.ty.bytes();
                // SAFETY: the plan's check bounds both places; verify_plan keeps them apart.
                unsafe {
                    self.comm.all_gather(team(), self.pointer(send), self.pointer(recv), bytes)
                }
                .map_err(aborted)
            }
            Action::ReduceScatter { reduce, send, recv, .. } => {
                let (from, to) = (self.pointer(send), self.pointer(recv));
                let elements = (recv.ty.shape.numel(), recv.ty.dtype);
                // SAFETY: as above.
                unsafe { self.comm.reduce_scatter(team(), from, to, elements, *reduce) }
                    .map_err(aborted)
            }
            Action::AllReduce { reduce, send, recv, .. } => {
                let (from, to) = (self.pointer(send), self.pointer(recv));
                let elements = (send.ty.shape.numel(), send.ty.dtype);
                // SAFETY: as above.
                unsafe { self.comm.all_reduce(team(), from, to, elements, *reduce) }
                    .map_err(aborted)
            }
            Action::Reshard { to, .. } => {
                let from = action.kept_by(self.comm.rank()).expect("invariant: a part is kept");
                // SAFETY: as above.
                unsafe {
                    std::ptr::copy(self.pointer(&from), self.pointer(to), to.ty.bytes());
                }
                Ok(())
            }
            Action::Copy { from, to } => {
                // SAFETY: both places are within their arenas; overlap is allowed.
                unsafe {
                    std::ptr::copy(self.pointer(from), self.pointer(to), from.ty.bytes());
                }
                Ok(())
            }
            Action::Zero { places } => {
                for place in places {
                    // SAFETY: the place is within its arena.
                    unsafe { self.pointer(place).write_bytes(0, place.ty.bytes()) };
                }
                Ok(())
            }
        }
    }

    fn kernel(&self, kernel: KernelId, reads: &[Place], writes: &[Place]) -> Result<(), String> {
        match &self.code[kernel] {
            Code::Generated { function, extent, grain } => {
                let operands: Vec<*mut u8> =
                    reads.iter().chain(writes).map(|p| self.pointer(p)).collect();
                call::split(&self.pool, *function, &operands, *extent, *grain);
                Ok(())
            }
            Code::Routine(routine) => {
                let operand = |p: &Place| Operand { pointer: self.pointer(p), bytes: p.ty.bytes() };
                let reads: Vec<Operand> = reads.iter().map(operand).collect();
                let writes: Vec<Operand> = writes.iter().map(operand).collect();
                // SAFETY: the plan's check bounds all places and compares their types with the body's; verify_plan
                // proves that results overlap no operand.
                unsafe { routine.run(&self.pool, &reads, &writes) }
            }
            Code::Interpreted(body) => self.interpret(body, reads, writes),
        }
    }

    fn interpret(&self, body: &Graph, reads: &[Place], writes: &[Place]) -> Result<(), String> {
        let mut feeds = HashMap::new();
        for (i, place) in reads.iter().enumerate() {
            let bytes = self.bytes(place.buffer, place.offset, place.ty.bytes());
            let tensor = Tensor::from_bytes(place.ty.clone(), bytes).map_err(|e| e.to_string())?;
            feeds.insert(i.to_string(), tensor);
        }
        let results = interpret::run(body, &feeds, interpret::Options::default())
            .map_err(|e| e.to_string())?;
        for ((_, tensor), place) in results.into_iter().zip(writes) {
            let bytes = tensor.to_bytes();
            // SAFETY: the result has the type of its place, which is within its arena.
            unsafe {
                std::ptr::copy_nonoverlapping(bytes.as_ptr(), self.pointer(place), bytes.len());
            }
        }
        Ok(())
    }
}

fn prepare<'a>(
    plan: &'a PlanDir,
    kernel: &'a Kernel,
    interpret: bool,
) -> Result<Code<'a>, RunError> {
    if interpret {
        return Ok(Code::Interpreted(&kernel.body));
    }
    let refuse = |path: &str, reason: String| RunError::Plan { path: path.into(), reason };
    match (&kernel.entry, &plan.library) {
        (Entry::Host { symbol, extent, grain }, Some(library)) => {
            let function =
                call::find(library, symbol).map_err(|reason| refuse(layout::KERNELS, reason))?;
            Ok(Code::Generated { function, extent: *extent, grain: (*grain).max(1) })
        }
        (Entry::Routine(routine), _) => {
            Ok(Code::Routine(Box::new(routine::Ready::of(kernel, routine)?)))
        }
        (Entry::Interpreter, _) => Ok(Code::Interpreted(&kernel.body)),
        (Entry::Host { .. } | Entry::Cuda { .. } | Entry::Launches(_), _) => {
            Err(refuse(layout::PLAN, format!("kernel `{}` has no code for a CPU", kernel.name)))
        }
    }
}

impl<C: Communicator> Device for Cpu<'_, C> {
    const METRICS_DELAY: usize = 0;

    fn feed(&mut self, buffer: BufferId, element: Element, bytes: &[u8]) -> Result<(), RunError> {
        let fed = self.plan.plan.fed().find(|(b, _)| *b == buffer);
        let (_, ty) = fed.expect("invariant: only what the plan is fed with is fed");
        if element.is(ty.dtype) {
            return self.write(buffer, 0, bytes);
        }
        let mut wide = Vec::with_capacity(ty.bytes());
        convert(element, bytes, ty.dtype, &mut wide);
        self.write(buffer, 0, &wide)
    }

    fn run(&mut self, tasks: Range<TaskId>) -> Result<(), RunError> {
        tasks.start.until(tasks.end).try_for_each(|i| self.run_task(i))
    }

    fn trace(&mut self, tasks: Range<TaskId>) -> Result<Vec<Span>, RunError> {
        let origin = Instant::now();
        let us = || origin.elapsed().as_secs_f64() * 1e6;
        let span = |task| {
            let start_us = us();
            self.run_task(task)?;
            Ok(Span { task, start_us, duration_us: us() - start_us })
        };
        tasks.start.until(tasks.end).map(span).collect()
    }

    fn note_metrics(&mut self) -> Result<(), RunError> {
        let value = |metric: &Metric| {
            // SAFETY: the plan's check keeps the place within its arena; metrics are f32.
            unsafe { self.pointer(&metric.place).cast::<f32>().read() }
        };
        self.metrics.push_back(self.plan.plan.metrics.iter().map(value).collect());
        Ok(())
    }

    fn take_metrics(&mut self) -> Result<Vec<f32>, RunError> {
        Ok(self.metrics.pop_front().expect("invariant: metrics are noted before they are taken"))
    }

    fn write(&mut self, buffer: BufferId, offset: usize, bytes: &[u8]) -> Result<(), RunError> {
        let buffer = &self.plan.plan.buffers[buffer];
        assert!(offset + bytes.len() <= buffer.bytes, "write beyond buffer `{}`", buffer.name);
        let to = self.arenas.pointer(buffer, offset);
        // SAFETY: the range is within the buffer, which is within its arena.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len()) };
        Ok(())
    }

    fn read(&self, buffer: BufferId, offset: usize, bytes: usize) -> Result<Vec<u8>, RunError> {
        let mut copy = Vec::new();
        copy.try_reserve_exact(bytes).map_err(|_| arena::lacking(bytes as u64))?;
        copy.extend_from_slice(self.bytes(buffer, offset, bytes));
        Ok(copy)
    }

    fn gather(&self, buffer: BufferId, offset: usize, bytes: usize) -> Result<Vec<u8>, RunError> {
        Ok(self.comm.gather(self.bytes(buffer, offset, bytes))?)
    }

    fn largest(&self, value: u64) -> Result<u64, RunError> {
        Ok(self.comm.largest(value)?)
    }

    fn memory_in_use(&self) -> Option<u64> {
        memory::resident()
    }

    fn usage(&self) -> Result<Usage, RunError> {
        let plan = &self.plan.plan;
        let kind = |task: TaskId| match &plan.tasks[task].action {
            Action::Kernel { kernel, .. } => match &self.code[*kernel] {
                Code::Generated { .. } => "generated",
                Code::Routine(_) => "library",
                Code::Interpreted(_) => "interpreted",
            },
            Action::Copy { .. } | Action::Reshard { .. } => "copy",
            Action::Zero { .. } => "zero",
            _ => "collective",
        };
        Ok(Usage {
            device: plan.target.device.to_string(),
            persistent_bytes: plan.persistent_bytes,
            workspace_bytes: plan.workspace_bytes,
            host_bytes: plan.host_bytes,
            launches: launches_of_step(plan, |task| vec![kind(task)]),
            ..Usage::default()
        })
    }
}
