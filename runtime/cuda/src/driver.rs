//! Interface of the CUDA device to the driver and NVIDIA's libraries, implemented by [`super::real`] and, for tests, by
//! [`super::recording`].
//!
//! The caller chooses streams, events and addresses. Calls enqueue work and return immediately unless stated otherwise.

use super::cudnn::Engine;
use super::error::CudaError;
use super::gemm::GemmProblem;
use frit_ir::DType;
use frit_ir::ops::ReduceKind;
use frit_ir::plan::Operation;
use frit_ir::plan::Team;
use std::time::Duration;

/// An address in device memory.
pub type Address = u64;

/// Handles of objects that the driver created. Zero is none.
macro_rules! handles {
    ($($(#[$meta:meta])* $name:ident),*) => {
        $($(#[$meta])* #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
        pub struct $name(pub usize);)*
    };
}
handles!(
    /// A stream.
    StreamHandle,
    /// An event.
    EventHandle,
    /// Loaded code.
    ModuleHandle,
    /// A kernel of a module.
    FunctionHandle,
    /// A captured and instantiated graph.
    GraphHandle,
    /// A prepared GEMM.
    GemmHandle,
    /// An operation prepared with an engine.
    OperationHandle,
    /// The ranks of a collective; zero means all ranks.
    TeamHandle
);

/// Properties of a device.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Properties {
    /// Its name.
    pub name: String,
    /// Compute capability, such as (9, 0).
    pub capability: (u32, u32),
    /// Number of multiprocessors.
    pub multiprocessors: u32,
    /// Its total memory, in bytes.
    pub memory_bytes: usize,
    /// The newest CUDA version that the driver supports, such as (12, 4).
    pub driver_version: (u32, u32),
    /// Versions of the libraries on which selected algorithms depend.
    pub libraries: String,
}

/// How a kernel is launched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Blocks in x, y and z.
    pub grid: [u32; 3],
    /// Threads per block, in x.
    pub block: u32,
    /// Dynamic shared memory per block, in bytes.
    pub shared_bytes: u32,
}

/// Parameters of a kernel, in its layout.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Arguments {
    words: Vec<u64>,
    starts: Vec<usize>,
}

impl Arguments {
    /// Adds a parameter of at most eight bytes, in the low bytes.
    pub fn push(&mut self, value: u64) {
        self.push_words(&[value]);
    }

    /// Adds a structure of eight-byte fields.
    pub fn push_words(&mut self, words: &[u64]) {
        self.starts.push(self.words.len());
        self.words.extend(words);
    }

    /// The parameters, each as its words.
    pub fn iter(&self) -> impl Iterator<Item = &[u64]> {
        let ends = self.starts.iter().skip(1).copied().chain([self.words.len()]);
        self.starts.iter().zip(ends).map(|(begin, end)| &self.words[*begin..end])
    }
}

/// CUDA C++ to be compiled.
#[derive(Clone, Copy, Debug)]
pub struct Source<'a> {
    /// Its name, for errors.
    pub file: &'a str,
    /// The source text.
    pub text: &'a str,
    /// Macros and their values.
    pub defines: &'a [(String, String)],
}

/// Addresses of a GEMM's operands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GemmAddresses {
    /// Left operand.
    pub a: Address,
    /// Right operand.
    pub b: Address,
    /// Result.
    pub d: Address,
    /// The scales of both operands; zero for those that have none.
    pub scales: [Address; 2],
    /// The epilogue's vector; zero if it has none.
    pub vector: Address,
    /// The epilogue's matrix; zero if it has none.
    pub matrix: Address,
    /// Workspace of the algorithm, and its size in bytes.
    pub workspace: (Address, usize),
}

/// The reduction of a collective.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exchange {
    /// Concatenates the members' elements for every member, in rank order.
    AllGather,
    /// Combines the members' elements; each member receives its part.
    ReduceScatter(ReduceKind),
    /// Combines the members' elements for every member.
    AllReduce(ReduceKind),
    /// Sends a part to each of so many members, and receives theirs, in rank order.
    AllToAll(usize),
}

/// A collective and its operands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Collective {
    /// Its kind and reduction.
    pub exchange: Exchange,
    /// Its team.
    pub team: TeamHandle,
    /// Address of this rank's elements.
    pub send: Address,
    /// Address of the result.
    pub recv: Address,
    /// Elements sent in a gather, received in a reduce-scatter, of a part that is sent to one member, or of both sides.
    pub count: usize,
    /// Their type.
    pub dtype: DType,
}

/// An algorithm of the library, valid for one version of it.
pub type Algorithm = [u64; 8];

type Result<T = ()> = std::result::Result<T, CudaError>;

/// Requests to the driver.
///
/// # Errors
/// Every call may fail, with its name and the library's message; it may also report the failure of earlier work.
#[expect(clippy::missing_errors_doc, reason = "said of all of them at once")]
pub trait Driver {
    /// The device.
    fn properties(&self) -> &Properties;

    /// Time of the host since the driver was opened.
    fn clock(&self) -> Duration;

    /// Device memory, aligned to 256 bytes.
    fn allocate(&self, bytes: usize) -> Result<Address>;
    /// Frees device memory that is no longer in use.
    fn free(&self, at: Address) -> Result;
    /// Free and total bytes of device memory.
    fn memory(&self) -> Result<(usize, usize)>;
    /// Allocates pinned host memory, which the device accesses directly; initially zero.
    fn allocate_pinned(&self, bytes: usize) -> Result<*mut u8>;

    /// Creates a stream without implicit synchronization. Pending blocks of an urgent stream start before those of
    /// others.
    fn create_stream(&self, urgent: bool) -> Result<StreamHandle>;
    /// Creates an event; without timing it is cheaper.
    fn create_event(&self, timing: bool) -> Result<EventHandle>;
    /// Records an event on a stream.
    fn record(&self, event: EventHandle, stream: StreamHandle) -> Result;
    /// Makes a stream wait for the event's last record.
    fn wait(&self, stream: StreamHandle, event: EventHandle) -> Result;
    /// Whether the event has completed.
    fn reached(&self, event: EventHandle) -> Result<bool>;
    /// Microseconds between two completed events.
    fn elapsed_us(&self, from: EventHandle, to: EventHandle) -> Result<f64>;

    /// Copies from the host.
    ///
    /// # Safety
    /// `from` must hold that many bytes until the copy is complete.
    unsafe fn copy_in(
        &self,
        to: Address,
        from: *const u8,
        bytes: usize,
        on: StreamHandle,
    ) -> Result;
    /// Copies to the host.
    ///
    /// # Safety
    /// `to` must have room for that many bytes until the copy is complete.
    unsafe fn copy_out(&self, to: *mut u8, from: Address, bytes: usize, on: StreamHandle)
    -> Result;
    /// Copies within the device.
    fn copy(&self, to: Address, from: Address, bytes: usize, on: StreamHandle) -> Result;
    /// Sets every byte to zero.
    fn zero(&self, at: Address, bytes: usize, on: StreamHandle) -> Result;

    /// The compiler of CUDA C++ with its version and target: everything besides the source on which compiled code
    /// depends.
    fn compiler(&self) -> String;
    /// Compiles CUDA C++ to code for this device, in parallel; waits until all are compiled.
    fn compile(&self, sources: &[Source<'_>]) -> Result<Vec<Vec<u8>>>;
    /// Loads PTX or compiled code, and waits for it. `name` is for errors.
    fn load(&self, name: &str, code: &[u8]) -> Result<ModuleHandle>;
    /// Finds a kernel, and allows it this much dynamic shared memory.
    fn function(
        &self,
        module: ModuleHandle,
        name: &str,
        shared_bytes: u32,
    ) -> Result<FunctionHandle>;
    /// Number of blocks of a kernel without dynamic shared memory that are resident on all multiprocessors together.
    fn resident_blocks(&self, function: FunctionHandle, block: u32) -> Result<u32>;
    /// Launches a kernel.
    ///
    /// # Safety
    /// The arguments must match the kernel's parameters, and pointers must be valid when it runs.
    unsafe fn launch(
        &self,
        function: FunctionHandle,
        shape: Shape,
        arguments: &Arguments,
        on: StreamHandle,
    ) -> Result;

    /// Algorithms for a GEMM within this workspace, in the library's order of expected speed.
    fn algorithms(&self, problem: &GemmProblem, workspace_bytes: usize) -> Result<Vec<Algorithm>>;
    /// Prepares a GEMM.
    fn prepare(&self, problem: &GemmProblem, algorithm: &Algorithm) -> Result<GemmHandle>;
    /// Multiplies.
    ///
    /// # Safety
    /// The addresses are valid when it runs.
    unsafe fn multiply(&self, problem: GemmHandle, at: GemmAddresses, on: StreamHandle) -> Result;

    /// Whether cuDNN is available.
    fn has_engines(&self) -> bool;
    /// cuDNN engines for an operation within `workspace_bytes`, in order of expected speed; none where the library is
    /// missing.
    fn engines(&self, operation: &Operation, workspace_bytes: usize) -> Result<Vec<Engine>>;
    /// Prepares an operation with an engine, within `workspace_bytes`; also returns the workspace that it needs.
    fn plan(
        &self,
        operation: &Operation,
        engine: &Engine,
        workspace_bytes: usize,
    ) -> Result<(OperationHandle, usize)>;
    /// Enqueues an operation; `at` are the addresses of its tensors, in order.
    ///
    /// # Safety
    /// The addresses, and the workspace for which it was prepared, must be valid when it runs.
    unsafe fn execute(
        &self,
        operation: OperationHandle,
        at: &[Address],
        workspace: Address,
        on: StreamHandle,
    ) -> Result;

    /// Begins a capture: work enqueued on this stream, and on streams that wait for it, is captured instead of
    /// executed.
    fn begin_capture(&self, stream: StreamHandle) -> Result;
    /// Ends the capture; every other stream must have been joined.
    fn end_capture(&self, stream: StreamHandle) -> Result<GraphHandle>;
    /// Destroys a captured graph that has finished, unless it was by [`Driver::abort`].
    fn destroy_graph(&self, graph: GraphHandle) -> Result;
    /// Launches a captured graph.
    fn launch_graph(&self, graph: GraphHandle, on: StreamHandle) -> Result;

    /// Creates the team of which this rank is a member. Every rank must create its own team of the same shape, in the
    /// same order.
    fn create_team(&self, team: Team) -> Result<TeamHandle>;
    /// Enqueues a collective with the other members of a team.
    fn collective(&self, collective: &Collective, on: StreamHandle) -> Result;
    /// An error of another rank that has been detected.
    fn communication_error(&self) -> Option<String>;
    /// Aborts collectives that wait for other ranks, and destroys all captured graphs: none may be launched any more.
    fn abort(&self);
}
