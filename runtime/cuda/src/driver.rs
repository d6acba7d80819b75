//! Interface between the CUDA device and the driver and NVIDIA's libraries, implemented by [`super::real`] and, for tests, by
//! [`super::recording`].
//!
//! The caller decides on streams, events and addresses. Calls enqueue work and return at once unless stated otherwise.

use super::cudnn::Engine;
use super::error::CudaError;
use super::gemm::Product;
use frit_ir::DType;
use frit_ir::ops::ReduceKind;
use frit_ir::plan::Operation;
use frit_ir::plan::Team;

/// An address in device memory.
pub type Address = u64;

/// Names of things the driver made. A zero is none.
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
    ProductHandle,
    /// An operation made ready with an engine.
    OperationHandle,
    /// Ranks that take part in a collective; zero are all.
    TeamHandle
);

/// What kind of device it is.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Properties {
    /// As NVIDIA calls it.
    pub name: String,
    /// Compute capability, such as (9, 0).
    pub capability: (u32, u32),
    /// Number of multiprocessors.
    pub multiprocessors: u32,
    /// All of its memory, in bytes.
    pub memory_bytes: usize,
    /// The newest CUDA version that the driver supports, such as (12, 4).
    pub driver_version: (u32, u32),
    /// Versions of the libraries that chosen algorithms depend on.
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

/// Parameters of a kernel, as it reads them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Arguments {
    words: Vec<u64>,
    starts: Vec<usize>,
}

impl Arguments {
    /// Adds a parameter of at most eight bytes, in the low ones.
    pub fn push(&mut self, value: u64) {
        self.push_words(&[value]);
    }

    /// Adds a structure of eight-byte fields.
    pub fn push_words(&mut self, words: &[u64]) {
        self.starts.push(self.words.len());
        self.words.extend(words);
    }

    /// The parameters, each from its first word on.
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
    /// What to compile.
    pub text: &'a str,
    /// Macros and their values.
    pub defines: &'a [(String, String)],
}

/// Addresses of a GEMM's operands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProductAddresses {
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
    /// Memory for the algorithm, and its size in bytes.
    pub workspace: (Address, usize),
}

/// The reduction of a collective.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exchange {
    /// Concatenates them for every member, in rank order.
    AllGather,
    /// Combines them; each member receives its part.
    ReduceScatter(ReduceKind),
    /// Combines them for every member.
    AllReduce(ReduceKind),
}

/// A collective and its operands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Collective {
    /// What it does.
    pub exchange: Exchange,
    /// Who takes part.
    pub team: TeamHandle,
    /// This rank's elements.
    pub send: Address,
    /// Where the result goes.
    pub recv: Address,
    /// Elements that are sent to be gathered, received of a scatter, or both.
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
/// All of them fail with what was asked for and what the library said; so may any with a failure of what
/// was asked before.
#[expect(clippy::missing_errors_doc, reason = "said of all of them at once")]
pub trait Driver {
    /// The device.
    fn properties(&self) -> &Properties;

    /// Device memory, aligned to 256 bytes.
    fn allocate(&self, bytes: usize) -> Result<Address>;
    /// Gives device memory back that nothing uses any more.
    fn free(&self, at: Address) -> Result;
    /// Free bytes of device memory, and all.
    fn memory(&self) -> Result<(usize, usize)>;
    /// Host memory that the device reads and writes directly, zero at first.
    fn allocate_pinned(&self, bytes: usize) -> Result<*mut u8>;

    /// A stream that waits for no other by itself. Blocks of an urgent one start before blocks of others that
    /// have not started.
    fn create_stream(&self, urgent: bool) -> Result<StreamHandle>;
    /// An event; one that does not take the time is cheaper.
    fn create_event(&self, timing: bool) -> Result<EventHandle>;
    /// Marks a point of a stream.
    fn record(&self, event: EventHandle, stream: StreamHandle) -> Result;
    /// Makes a stream wait for the point that was marked last.
    fn wait(&self, stream: StreamHandle, event: EventHandle) -> Result;
    /// Whether the point was reached.
    fn reached(&self, event: EventHandle) -> Result<bool>;
    /// Microseconds between two points that were reached.
    fn elapsed_us(&self, from: EventHandle, to: EventHandle) -> Result<f64>;

    /// Copies from the host.
    ///
    /// # Safety
    /// `from` holds so many bytes until the copy was made.
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
    /// `to` has room for so many bytes until the copy was made.
    unsafe fn copy_out(&self, to: *mut u8, from: Address, bytes: usize, on: StreamHandle)
    -> Result;
    /// Copies within the device.
    fn copy(&self, to: Address, from: Address, bytes: usize, on: StreamHandle) -> Result;
    /// Sets every byte to zero.
    fn zero(&self, at: Address, bytes: usize, on: StreamHandle) -> Result;

    /// The compiler of CUDA C++ with its version, and for which device it compiles: what compiled code depends on
    /// beside its source.
    fn compiler(&self) -> String;
    /// Compiles CUDA C++ to code of this device, all sources at once; waits for it.
    fn compile(&self, sources: &[Source<'_>]) -> Result<Vec<Vec<u8>>>;
    /// Loads PTX or compiled code; waits for it. `name` is for errors.
    fn load(&self, name: &str, code: &[u8]) -> Result<ModuleHandle>;
    /// Finds a kernel, and allows it so much dynamic shared memory.
    fn function(
        &self,
        module: ModuleHandle,
        name: &str,
        shared_bytes: u32,
    ) -> Result<FunctionHandle>;
    /// Blocks of so many threads of a kernel without dynamic shared memory that all multiprocessors
    /// run at once.
    fn resident_blocks(&self, function: FunctionHandle, block: u32) -> Result<u32>;
    /// Launches a kernel.
    ///
    /// # Safety
    /// The arguments are what the kernel takes, and its pointers are valid when it runs.
    unsafe fn launch(
        &self,
        function: FunctionHandle,
        shape: Shape,
        arguments: &Arguments,
        on: StreamHandle,
    ) -> Result;

    /// Algorithms for a GEMM within this workspace, in the library's order of expected speed.
    fn algorithms(&self, product: &Product, workspace_bytes: usize) -> Result<Vec<Algorithm>>;
    /// Prepares a GEMM.
    fn prepare(&self, product: &Product, algorithm: &Algorithm) -> Result<ProductHandle>;
    /// Multiplies.
    ///
    /// # Safety
    /// The addresses are valid when it runs.
    unsafe fn multiply(
        &self,
        product: ProductHandle,
        at: ProductAddresses,
        on: StreamHandle,
    ) -> Result;

    /// Whether operations may have engines at all.
    fn has_engines(&self) -> bool;
    /// Engines of cuDNN for an operation within so much workspace, the one that should be fastest first; none where
    /// the library is missing.
    fn engines(&self, operation: &Operation, workspace_bytes: usize) -> Result<Vec<Engine>>;
    /// Makes an operation ready with an engine, within so much workspace; returns how much it needs, too.
    fn plan(
        &self,
        operation: &Operation,
        engine: &Engine,
        workspace_bytes: usize,
    ) -> Result<(OperationHandle, usize)>;
    /// Computes an operation; `at` are its tensors, in their order.
    ///
    /// # Safety
    /// The addresses, and so much workspace as it was made ready with, are valid when it runs.
    unsafe fn execute(
        &self,
        operation: OperationHandle,
        at: &[Address],
        workspace: Address,
        on: StreamHandle,
    ) -> Result;

    /// From here on, work enqueued on this stream, and on streams that wait for it, is captured instead of executed.
    fn begin_capture(&self, stream: StreamHandle) -> Result;
    /// Ends it; every other stream must have been joined.
    fn end_capture(&self, stream: StreamHandle) -> Result<GraphHandle>;
    /// Forgets what was captured, once it was done.
    fn destroy_graph(&self, graph: GraphHandle) -> Result;
    /// Does what was captured.
    fn launch_graph(&self, graph: GraphHandle, on: StreamHandle) -> Result;

    /// The ranks of a team, of which this one is a member. Every rank must ask for its own team of the same
    /// shape, in the same order.
    fn create_team(&self, team: Team) -> Result<TeamHandle>;
    /// Exchanges data with the other members of a team.
    fn collective(&self, collective: &Collective, on: StreamHandle) -> Result;
    /// An error of another rank that was noticed meanwhile.
    fn communication_error(&self) -> Option<String>;
    /// Ends collectives that wait for other ranks.
    fn abort(&self);
}
