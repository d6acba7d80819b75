//! A driver that records calls without executing them, so that tests can check a plan's streams, events, launches and
//! collectives.

use super::cudnn::Engine;
use super::driver::*;
use super::error::CudaError;
use super::gemm::GemmProblem;
use frit_ir::plan::Operation;
use frit_ir::plan::Team;
use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::time::Duration;

/// A recorded call.
#[derive(Clone, Debug, PartialEq)]
pub enum Call {
    /// Device memory.
    Allocate(usize),
    /// Freed device memory, by its size.
    Free(usize),
    /// A stream, and whether it is urgent.
    CreateStream(StreamHandle, bool),
    /// An event recorded on a stream.
    Record(EventHandle, StreamHandle),
    /// A stream that waits for an event.
    Wait(StreamHandle, EventHandle),
    /// A query whether an event has completed.
    Reached(EventHandle),
    /// Bytes from the host: to, how many, on which stream.
    CopyIn(Address, usize, StreamHandle),
    /// Bytes to the host: from, how many, on which stream.
    CopyOut(Address, usize, StreamHandle),
    /// Bytes within the device: to, from, how many, on which stream.
    Copy(Address, Address, usize, StreamHandle),
    /// Bytes set to zero.
    Zero(Address, usize, StreamHandle),
    /// CUDA C++ compiled.
    Compile(String),
    /// A module loaded.
    Load(String),
    /// A kernel launched, by its name.
    Launch(String, Shape, Arguments, StreamHandle),
    /// A GEMM.
    Multiply(String, GemmAddresses, StreamHandle),
    /// An operation with an engine of cuDNN.
    Execute(String, Vec<Address>, StreamHandle),
    /// A capture began.
    BeginCapture(StreamHandle),
    /// A capture ended.
    EndCapture(StreamHandle),
    /// A graph launched.
    LaunchGraph(GraphHandle, StreamHandle),
    /// A collective: its name, team, elements, stream.
    Collective(&'static str, TeamHandle, usize, StreamHandle),
    /// Collectives were aborted.
    Abort,
}

/// The driver.
#[derive(Debug, Default)]
pub struct Recording {
    /// The device.
    pub properties: Properties,
    calls: RefCell<Vec<Call>>,
    made: Cell<usize>,
    /// Sizes of allocations, in order.
    allocated: RefCell<Vec<usize>>,
    names: RefCell<Vec<String>>,
    pinned: RefCell<Vec<Box<[u64]>>>,
    teams: RefCell<Vec<Team>>,
    /// Total bytes of device memory.
    pub memory_bytes: usize,
    /// A module that cannot be loaded, by a part of its name.
    pub broken_module: Option<&'static str>,
    /// Whether GEMMs have no algorithm with an epilogue.
    pub plain_gemms: bool,
    /// How many algorithms GEMMs have.
    pub n_algorithms: u64,
    /// How many engines operations have; none if there is no cuDNN.
    pub engines: Option<usize>,
    /// Microseconds in which an engine is made ready.
    pub plan_us: f64,
    /// Workspace that every engine needs, in bytes.
    pub engine_bytes: usize,
    /// The engine or algorithm of this number, counted from 1, fails when it runs.
    pub broken: Option<u64>,
    /// Microseconds of calls, by a part of their name; 1 for all others.
    pub durations: Vec<(&'static str, f64)>,
    /// The same of calls in a graph, before those.
    pub captured_durations: Vec<(&'static str, f64)>,
    /// Marks after which the device is lost.
    pub lost_after: Cell<Option<usize>>,
    /// Microseconds since the beginning, at each event, and within a capture.
    clock: Cell<f64>,
    marks: RefCell<HashMap<EventHandle, f64>>,
    captured: Cell<Option<f64>>,
    graphs: RefCell<HashMap<GraphHandle, f64>>,
    /// Whether events never complete, as when a collective waits for a lost rank.
    pub stuck: Cell<bool>,
    /// The failure of another rank.
    pub peer_error: RefCell<Option<String>>,
}

impl Recording {
    /// A device with 80 GB of memory of this compute capability.
    pub fn new(capability: (u32, u32)) -> Recording {
        let properties = Properties {
            name: "recording".into(),
            capability,
            multiprocessors: 132,
            memory_bytes: 80 << 30,
            driver_version: (12, 4),
            libraries: "none".into(),
        };
        Recording { properties, memory_bytes: 80 << 30, n_algorithms: 2, ..Recording::default() }
    }

    /// Takes the calls recorded so far.
    pub fn take(&self) -> Vec<Call> {
        self.calls.take()
    }

    /// The ranks of a team; `None` means all.
    pub fn team(&self, handle: TeamHandle) -> Option<Team> {
        self.teams.borrow().get(handle.0.checked_sub(1)?).copied()
    }

    fn note(&self, call: Call) {
        self.calls.borrow_mut().push(call);
    }

    /// Advances the clock by the duration of work, immediately or when the captured graph is launched.
    fn work(&self, name: &str) {
        let in_graph = self.captured.get().map_or(&[][..], |_| &self.captured_durations);
        let mut durations = in_graph.iter().chain(&self.durations);
        let named = durations.find(|(part, _)| name.contains(part));
        let us = named.map_or(1.0, |(_, us)| *us);
        match self.captured.get() {
            Some(before) => self.captured.set(Some(before + us)),
            None => self.clock.set(self.clock.get() + us),
        }
    }

    /// A unique number.
    fn make(&self) -> usize {
        self.made.set(self.made.get() + 1);
        self.made.get()
    }

    /// Fails if the call's engine or algorithm is the broken one.
    fn refuse_broken(&self, name: &str) -> Result {
        let broken = self.broken.map(|number| format!("algorithm {number}"));
        match broken {
            Some(broken) if name.ends_with(&broken) => {
                Err(CudaError::Call { call: "a library", reason: format!("{broken} is broken") })
            }
            _ => Ok(()),
        }
    }

    fn name(&self, name: String) -> usize {
        let mut names = self.names.borrow_mut();
        names.push(name);
        names.len() - 1
    }
}

type Result<T = ()> = std::result::Result<T, CudaError>;

impl Driver for Recording {
    fn properties(&self) -> &Properties {
        &self.properties
    }

    fn clock(&self) -> Duration {
        Duration::from_secs_f64(1e-6 * self.clock.get())
    }

    fn allocate(&self, bytes: usize) -> Result<Address> {
        self.note(Call::Allocate(bytes));
        if bytes > self.memory()?.0 {
            return Err(CudaError::OutOfMemory {
                wanted: bytes,
                detail: String::new(),
                free: self.memory()?.0,
                total: self.memory_bytes,
            });
        }
        self.allocated.borrow_mut().push(bytes);
        Ok(1 << 40)
    }

    fn free(&self, _at: Address) -> Result {
        let bytes = self.allocated.borrow_mut().pop().unwrap_or_default();
        self.note(Call::Free(bytes));
        Ok(())
    }

    fn memory(&self) -> Result<(usize, usize)> {
        let allocated: usize = self.allocated.borrow().iter().sum();
        Ok((self.memory_bytes.saturating_sub(allocated), self.memory_bytes))
    }

    fn allocate_pinned(&self, bytes: usize) -> Result<*mut u8> {
        let mut memory = vec![0_u64; bytes.div_ceil(8)].into_boxed_slice();
        let pointer = memory.as_mut_ptr().cast();
        self.pinned.borrow_mut().push(memory);
        Ok(pointer)
    }

    fn create_stream(&self, urgent: bool) -> Result<StreamHandle> {
        let made = StreamHandle(self.make());
        self.note(Call::CreateStream(made, urgent));
        Ok(made)
    }

    fn create_event(&self, _timing: bool) -> Result<EventHandle> {
        Ok(EventHandle(self.make()))
    }

    fn record(&self, event: EventHandle, stream: StreamHandle) -> Result {
        if let Some(left) = self.lost_after.get() {
            let reason = "the device is lost".into();
            let lost = CudaError::Call { call: "cuEventRecord", reason };
            self.lost_after.set(Some(left.checked_sub(1).ok_or(lost)?));
        }
        // No two marks are of one time.
        self.clock.set(self.clock.get() + 1e-3);
        self.marks.borrow_mut().insert(event, self.clock.get());
        self.note(Call::Record(event, stream));
        Ok(())
    }

    fn wait(&self, stream: StreamHandle, event: EventHandle) -> Result {
        self.note(Call::Wait(stream, event));
        Ok(())
    }

    fn reached(&self, event: EventHandle) -> Result<bool> {
        if !self.stuck.get() {
            self.note(Call::Reached(event));
        }
        Ok(!self.stuck.get())
    }

    fn elapsed_us(&self, from: EventHandle, to: EventHandle) -> Result<f64> {
        let marks = self.marks.borrow();
        let at = |event: EventHandle| marks.get(&event).copied().unwrap_or_default();
        Ok(at(to) - at(from))
    }

    unsafe fn copy_in(
        &self,
        to: Address,
        _from: *const u8,
        bytes: usize,
        on: StreamHandle,
    ) -> Result {
        self.note(Call::CopyIn(to, bytes, on));
        Ok(())
    }

    unsafe fn copy_out(
        &self,
        _to: *mut u8,
        from: Address,
        bytes: usize,
        on: StreamHandle,
    ) -> Result {
        self.note(Call::CopyOut(from, bytes, on));
        Ok(())
    }

    fn copy(&self, to: Address, from: Address, bytes: usize, on: StreamHandle) -> Result {
        self.note(Call::Copy(to, from, bytes, on));
        Ok(())
    }

    fn zero(&self, at: Address, bytes: usize, on: StreamHandle) -> Result {
        self.note(Call::Zero(at, bytes, on));
        Ok(())
    }

    fn compiler(&self) -> String {
        let (major, minor) = self.properties.capability;
        format!("recording sm_{major}{minor}")
    }

    fn compile(&self, sources: &[Source<'_>]) -> Result<Vec<Vec<u8>>> {
        let compile = |source: &Source<'_>| {
            let defines = source.defines.iter().map(|(k, v)| format!("{k}={v}"));
            let defines = defines.collect::<Vec<_>>().join(" ");
            self.note(Call::Compile(format!("{} {defines}", source.file)));
            format!("{} {defines}", source.file).into_bytes()
        };
        Ok(sources.iter().map(compile).collect())
    }

    fn load(&self, name: &str, _code: &[u8]) -> Result<ModuleHandle> {
        if self.broken_module.is_some_and(|broken| name.contains(broken)) {
            let reason = "device kernel image is invalid".into();
            return Err(CudaError::Module { name: name.into(), reason });
        }
        self.note(Call::Load(name.into()));
        Ok(ModuleHandle(self.make()))
    }

    fn function(
        &self,
        _module: ModuleHandle,
        name: &str,
        _shared_bytes: u32,
    ) -> Result<FunctionHandle> {
        Ok(FunctionHandle(self.name(name.into())))
    }

    fn resident_blocks(&self, _function: FunctionHandle, block: u32) -> Result<u32> {
        Ok(self.properties.multiprocessors * (2048 / block))
    }

    unsafe fn launch(
        &self,
        function: FunctionHandle,
        shape: Shape,
        arguments: &Arguments,
        on: StreamHandle,
    ) -> Result {
        let name = self.names.borrow()[function.0].clone();
        self.work(&name);
        self.note(Call::Launch(name, shape, arguments.clone(), on));
        Ok(())
    }

    fn algorithms(&self, problem: &GemmProblem, _workspace_bytes: usize) -> Result<Vec<Algorithm>> {
        if self.plain_gemms && problem.epilogue.is_optional() {
            let (library, problem) = (self.properties.libraries.clone(), problem.to_string());
            return Err(CudaError::NoAlgorithm { library, problem });
        }
        Ok((1..=self.n_algorithms).map(|number| [number; 8]).collect())
    }

    fn prepare(&self, problem: &GemmProblem, algorithm: &Algorithm) -> Result<GemmHandle> {
        Ok(GemmHandle(self.name(format!("{problem} algorithm {}", algorithm[0]))))
    }

    unsafe fn multiply(&self, problem: GemmHandle, at: GemmAddresses, on: StreamHandle) -> Result {
        let name = self.names.borrow()[problem.0].clone();
        self.refuse_broken(&name)?;
        self.work(&name);
        self.note(Call::Multiply(name, at, on));
        Ok(())
    }

    fn has_engines(&self) -> bool {
        self.engines.is_some()
    }

    fn engines(&self, _operation: &Operation, _workspace_bytes: usize) -> Result<Vec<Engine>> {
        let engine = |engine| Engine { engine, knobs: vec![(2, 5)] };
        Ok((1..=self.engines.unwrap_or(0) as i64).map(engine).collect())
    }

    fn plan(
        &self,
        operation: &Operation,
        engine: &Engine,
        workspace_bytes: usize,
    ) -> Result<(OperationHandle, usize)> {
        let name = format!("{operation} algorithm {}", engine.engine);
        self.clock.set(self.clock.get() + self.plan_us);
        if self.engine_bytes > workspace_bytes {
            let reason = format!("{} bytes of workspace", self.engine_bytes);
            return Err(CudaError::Call { call: "a library", reason });
        }
        Ok((OperationHandle(self.name(name)), self.engine_bytes))
    }

    unsafe fn execute(
        &self,
        operation: OperationHandle,
        at: &[Address],
        _workspace: Address,
        on: StreamHandle,
    ) -> Result {
        let name = self.names.borrow()[operation.0].clone();
        self.refuse_broken(&name)?;
        self.work(&name);
        self.note(Call::Execute(name, at.to_vec(), on));
        Ok(())
    }

    fn begin_capture(&self, stream: StreamHandle) -> Result {
        self.captured.set(Some(0.0));
        self.note(Call::BeginCapture(stream));
        Ok(())
    }

    fn end_capture(&self, stream: StreamHandle) -> Result<GraphHandle> {
        self.note(Call::EndCapture(stream));
        let graph = GraphHandle(self.make());
        self.graphs.borrow_mut().insert(graph, self.captured.take().unwrap_or_default());
        Ok(graph)
    }

    fn destroy_graph(&self, graph: GraphHandle) -> Result {
        self.graphs.borrow_mut().remove(&graph);
        Ok(())
    }

    fn launch_graph(&self, graph: GraphHandle, on: StreamHandle) -> Result {
        let us = self.graphs.borrow().get(&graph).copied().unwrap_or_default();
        self.clock.set(self.clock.get() + us);
        self.note(Call::LaunchGraph(graph, on));
        Ok(())
    }

    fn create_team(&self, team: Team) -> Result<TeamHandle> {
        let mut teams = self.teams.borrow_mut();
        teams.push(team);
        Ok(TeamHandle(teams.len()))
    }

    fn collective(&self, collective: &Collective, on: StreamHandle) -> Result {
        let name = match collective.exchange {
            Exchange::AllGather => "all_gather",
            Exchange::ReduceScatter(_) => "reduce_scatter",
            Exchange::AllReduce(_) => "all_reduce",
            Exchange::AllToAll(_) => "all_to_all",
        };
        self.note(Call::Collective(name, collective.team, collective.count, on));
        Ok(())
    }

    fn communication_error(&self) -> Option<String> {
        self.peer_error.borrow().clone()
    }

    fn abort(&self) {
        self.note(Call::Abort);
    }
}
