//! The driver implementation for real GPUs: function tables of libcuda and NVIDIA's libraries.

use super::cublaslt::CublasLt;
use super::cudnn::{Cudnn, Engine};
use super::driver::*;
use super::error::CudaError;
use super::gemm::GemmProblem;
use super::machine::Machine;
use super::nccl::Nccl;
use super::nvrtc::Nvrtc;
use cudarc::driver::sys::{
    CUcontext, CUevent, CUfunction, CUfunction_attribute, CUgraph, CUgraphExec, CUjit_option,
    CUmodule, CUstream, CUstreamCaptureMode,
};
use frit_ir::plan::Operation;
use frit_ir::plan::Team;
use std::cell::{OnceCell, RefCell};
use std::ffi::{CStr, CString, c_int, c_uint, c_void};
use std::ptr::null_mut;
use std::time::{Duration, Instant};

const NOT_READY: u32 = 600;
const OUT_OF_MEMORY: u32 = 2;
const STREAM_NON_BLOCKING: c_uint = 1;
const EVENT_DISABLE_TIMING: c_uint = 2;
/// Kernels of a graph keep the priority of the stream on which they were captured.
const GRAPH_USE_NODE_PRIORITY: u64 = 8;

type Result<T = ()> = std::result::Result<T, CudaError>;

/// A GPU of this machine and the libraries that a plan needs.
pub struct Real {
    machine: Machine,
    context: CUcontext,
    properties: Properties,
    opened: Instant,
    cublaslt: Option<CublasLt>,
    cudnn: Option<Cudnn>,
    nvrtc: OnceCell<Nvrtc>,
    nccl: Option<Nccl>,
    /// Captured and not destroyed.
    graphs: RefCell<Vec<GraphHandle>>,
}

/// The libraries that a plan needs besides the driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Libraries {
    /// cuBLASLt, for GEMMs.
    pub cublaslt: bool,
    /// cuDNN, if installed.
    pub cudnn: bool,
    /// NVRTC, for kernels of CUDA C++.
    pub nvrtc: bool,
}

impl Real {
    /// Opens a device with these libraries.
    ///
    /// # Errors
    /// If the driver, the device or a library is missing or too old.
    pub fn open(ordinal: usize, libraries: Libraries) -> Result<Real> {
        let opened = Instant::now();
        let machine = Machine::open()?;
        let device = machine.device(ordinal)?;
        let mut properties = machine.properties(ordinal)?;
        let mut context: CUcontext = null_mut();
        // SAFETY: the pointer is valid; the context is made current in the thread that uses it.
        unsafe {
            let code = (machine.api.cuDevicePrimaryCtxRetain)(&mut context, device);
            machine.check("cuDevicePrimaryCtxRetain", code)?;
            machine.check("cuCtxSetCurrent", (machine.api.cuCtxSetCurrent)(context))?;
        }
        let cublaslt = libraries.cublaslt.then(|| CublasLt::open(machine.version)).transpose()?;
        let nvrtc = OnceCell::new();
        if let Some(cublaslt) = &cublaslt {
            properties.libraries = cublaslt.name();
        }
        // Without it the plan's own kernels run.
        let cudnn = libraries.cudnn.then(|| Cudnn::open(machine.version).ok()).flatten();
        if let Some(cudnn) = &cudnn {
            let separator = if properties.libraries.is_empty() { "" } else { ", " };
            properties.libraries += &format!("{separator}{}", cudnn.name());
        }
        let graphs = RefCell::default();
        let real = Real {
            machine,
            context,
            properties,
            opened,
            cublaslt,
            cudnn,
            nvrtc,
            nccl: None,
            graphs,
        };
        if libraries.nvrtc {
            real.nvrtc()?;
        }
        Ok(real)
    }

    /// NVRTC, opened when it is first needed: a plan without sources may still have to widen inputs.
    fn nvrtc(&self) -> Result<&Nvrtc> {
        if let Some(nvrtc) = self.nvrtc.get() {
            return Ok(nvrtc);
        }
        let nvrtc = Nvrtc::open(self.machine.version)?;
        Ok(self.nvrtc.get_or_init(|| nvrtc))
    }

    /// Sets the communicators after joining.
    pub fn join(&mut self, nccl: Nccl) {
        self.nccl = Some(nccl);
    }

    fn check(&self, call: &'static str, code: u32) -> Result {
        self.machine.check(call, code)
    }

    fn nccl(&self) -> Result<&Nccl> {
        self.nccl.as_ref().ok_or_else(|| absent("a collective", "NCCL"))
    }

    fn cudnn(&self) -> Result<&Cudnn> {
        self.cudnn.as_ref().ok_or_else(|| absent("an operation", "cuDNN"))
    }

    fn cublaslt(&self) -> Result<&CublasLt> {
        self.cublaslt.as_ref().ok_or_else(|| absent("a GEMM", "cuBLASLt"))
    }
}

fn absent(call: &'static str, library: &str) -> CudaError {
    CudaError::Call { call, reason: format!("{library} was not opened") }
}

/// The driver's stream of a handle.
pub(super) fn stream(handle: StreamHandle) -> CUstream {
    handle.0 as CUstream
}

fn event(handle: EventHandle) -> CUevent {
    handle.0 as CUevent
}

impl Driver for Real {
    fn properties(&self) -> &Properties {
        &self.properties
    }

    fn clock(&self) -> Duration {
        self.opened.elapsed()
    }

    fn allocate(&self, bytes: usize) -> Result<Address> {
        let mut at = 0;
        // SAFETY: the pointer is valid.
        match unsafe { (self.machine.api.cuMemAlloc_v2)(&mut at, bytes.max(1)) } {
            OUT_OF_MEMORY => {
                let ((free, total), detail) = (self.memory()?, String::new());
                Err(CudaError::OutOfMemory { wanted: bytes, detail, free, total })
            }
            code => self.check("cuMemAlloc", code).map(|()| at),
        }
    }

    fn free(&self, at: Address) -> Result {
        // SAFETY: it was allocated, and is used no more.
        let code = unsafe { (self.machine.api.cuMemFree_v2)(at) };
        self.check("cuMemFree", code)
    }

    fn memory(&self) -> Result<(usize, usize)> {
        let (mut free, mut total) = (0, 0);
        // SAFETY: the pointers are valid.
        let code = unsafe { (self.machine.api.cuMemGetInfo_v2)(&mut free, &mut total) };
        self.check("cuMemGetInfo", code).map(|()| (free, total))
    }

    fn allocate_pinned(&self, bytes: usize) -> Result<*mut u8> {
        let mut at = null_mut();
        // SAFETY: the pointer is valid.
        let code = unsafe { (self.machine.api.cuMemHostAlloc)(&mut at, bytes.max(1), 0) };
        self.check("cuMemHostAlloc", code)?;
        let at = at.cast::<u8>();
        // SAFETY: the memory was just allocated with this size.
        unsafe { at.write_bytes(0, bytes.max(1)) };
        Ok(at)
    }

    fn create_stream(&self, urgent: bool) -> Result<StreamHandle> {
        let (api, mut made) = (&self.machine.api, null_mut());
        // Of the priorities, the greatest is the most urgent and has the smallest number; other streams have the least.
        let (mut least, mut greatest) = (0, 0);
        // SAFETY: the pointers are valid.
        let code = unsafe { (api.cuCtxGetStreamPriorityRange)(&mut least, &mut greatest) };
        self.check("cuCtxGetStreamPriorityRange", code)?;
        let priority = if urgent { greatest } else { least };
        // SAFETY: the pointer is valid.
        let code =
            unsafe { (api.cuStreamCreateWithPriority)(&mut made, STREAM_NON_BLOCKING, priority) };
        self.check("cuStreamCreateWithPriority", code)?;
        Ok(StreamHandle(made as usize))
    }

    fn create_event(&self, timing: bool) -> Result<EventHandle> {
        let mut made = null_mut();
        let flags = if timing { 0 } else { EVENT_DISABLE_TIMING };
        // SAFETY: the pointer is valid.
        let code = unsafe { (self.machine.api.cuEventCreate)(&mut made, flags) };
        self.check("cuEventCreate", code)?;
        Ok(EventHandle(made as usize))
    }

    fn record(&self, mark: EventHandle, on: StreamHandle) -> Result {
        // SAFETY: events and streams are never destroyed.
        let code = unsafe { (self.machine.api.cuEventRecord)(event(mark), stream(on)) };
        self.check("cuEventRecord", code)
    }

    fn wait(&self, on: StreamHandle, mark: EventHandle) -> Result {
        // SAFETY: as above.
        let code = unsafe { (self.machine.api.cuStreamWaitEvent)(stream(on), event(mark), 0) };
        self.check("cuStreamWaitEvent", code)
    }

    fn reached(&self, mark: EventHandle) -> Result<bool> {
        // SAFETY: as above.
        match unsafe { (self.machine.api.cuEventQuery)(event(mark)) } {
            NOT_READY => Ok(false),
            code => self.check("cuEventQuery", code).map(|()| true),
        }
    }

    fn elapsed_us(&self, from: EventHandle, to: EventHandle) -> Result<f64> {
        let mut ms = 0.0;
        // SAFETY: the pointer is valid; as above.
        let code =
            unsafe { (self.machine.api.cuEventElapsedTime)(&mut ms, event(from), event(to)) };
        self.check("cuEventElapsedTime", code)?;
        Ok(f64::from(ms) * 1e3)
    }

    unsafe fn copy_in(
        &self,
        to: Address,
        from: *const u8,
        bytes: usize,
        on: StreamHandle,
    ) -> Result {
        // SAFETY: by the contract of this function.
        let code =
            unsafe { (self.machine.api.cuMemcpyHtoDAsync_v2)(to, from.cast(), bytes, stream(on)) };
        self.check("cuMemcpyHtoDAsync", code)
    }

    unsafe fn copy_out(
        &self,
        to: *mut u8,
        from: Address,
        bytes: usize,
        on: StreamHandle,
    ) -> Result {
        // SAFETY: by the contract of this function.
        let code =
            unsafe { (self.machine.api.cuMemcpyDtoHAsync_v2)(to.cast(), from, bytes, stream(on)) };
        self.check("cuMemcpyDtoHAsync", code)
    }

    fn copy(&self, to: Address, from: Address, bytes: usize, on: StreamHandle) -> Result {
        // SAFETY: the driver checks device addresses.
        let code = unsafe { (self.machine.api.cuMemcpyDtoDAsync_v2)(to, from, bytes, stream(on)) };
        self.check("cuMemcpyDtoDAsync", code)
    }

    fn zero(&self, at: Address, bytes: usize, on: StreamHandle) -> Result {
        // SAFETY: the driver checks device addresses.
        let code = unsafe { (self.machine.api.cuMemsetD8Async)(at, 0, bytes, stream(on)) };
        self.check("cuMemsetD8Async", code)
    }

    fn compiler(&self) -> String {
        let (major, minor) = self.properties.capability;
        let name = self.nvrtc().map_or_else(|_| String::new(), Nvrtc::name);
        format!("{name} sm_{major}{minor}")
    }

    fn compile(&self, sources: &[Source<'_>]) -> Result<Vec<Vec<u8>>> {
        self.nvrtc()?.compile_all(sources, self.properties.capability)
    }

    fn load(&self, name: &str, code: &[u8]) -> Result<ModuleHandle> {
        let mut module = null_mut();
        let mut log = vec![0_u8; 8192];
        let mut options = [
            CUjit_option::CU_JIT_ERROR_LOG_BUFFER,
            CUjit_option::CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES,
        ];
        let mut values: [*mut c_void; 2] = [log.as_mut_ptr().cast(), log.len() as *mut c_void];
        // PTX is text and must end with a zero.
        let mut image = code.to_vec();
        image.push(0);
        // SAFETY: the image ends with a zero; options and values are as many as said, and the log has
        // the size said.
        let code = unsafe {
            (self.machine.api.cuModuleLoadDataEx)(
                &mut module,
                image.as_ptr().cast(),
                2,
                options.as_mut_ptr(),
                values.as_mut_ptr(),
            )
        };
        self.check("cuModuleLoadDataEx", code).map_err(|e| {
            let log = CStr::from_bytes_until_nul(&log).map(|l| l.to_string_lossy().into_owned());
            let log = log.unwrap_or_default();
            let separator = if log.trim().is_empty() { "" } else { ": " };
            let reason = format!("{e}{separator}{}", log.trim());
            CudaError::Module { name: name.into(), reason }
        })?;
        Ok(ModuleHandle(module as usize))
    }

    fn function(
        &self,
        module: ModuleHandle,
        name: &str,
        shared_bytes: u32,
    ) -> Result<FunctionHandle> {
        let refuse = |reason: String| CudaError::Module { name: name.into(), reason };
        let symbol = CString::new(name).map_err(|e| refuse(e.to_string()))?;
        let mut function = null_mut();
        // SAFETY: modules are never unloaded; the name ends with a zero.
        let code = unsafe {
            let module = module.0 as CUmodule;
            (self.machine.api.cuModuleGetFunction)(&mut function, module, symbol.as_ptr())
        };
        self.check("cuModuleGetFunction", code).map_err(|e| refuse(e.to_string()))?;
        if shared_bytes > 0 {
            let most = CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
            // SAFETY: the function was just found.
            let code = unsafe {
                (self.machine.api.cuFuncSetAttribute)(function, most, shared_bytes as c_int)
            };
            self.check("cuFuncSetAttribute", code).map_err(|e| {
                refuse(format!("it needs {shared_bytes} bytes of shared memory: {e}"))
            })?;
        }
        Ok(FunctionHandle(function as usize))
    }

    fn resident_blocks(&self, function: FunctionHandle, block: u32) -> Result<u32> {
        let mut blocks: c_int = 0;
        // SAFETY: the pointer is valid; functions are never unloaded.
        let code = unsafe {
            let function = function.0 as CUfunction;
            let most = self.machine.api.cuOccupancyMaxActiveBlocksPerMultiprocessor;
            most(&mut blocks, function, block as c_int, 0)
        };
        self.check("cuOccupancyMaxActiveBlocksPerMultiprocessor", code)?;
        Ok(blocks as u32 * self.properties.multiprocessors)
    }

    unsafe fn launch(
        &self,
        function: FunctionHandle,
        shape: Shape,
        arguments: &Arguments,
        on: StreamHandle,
    ) -> Result {
        // The driver only reads them, though its signature takes mutable pointers.
        let mut pointers: Vec<*mut c_void> =
            arguments.iter().map(|words| words.as_ptr().cast_mut().cast()).collect();
        let Shape { grid: [x, y, z], block, shared_bytes } = shape;
        // SAFETY: by the contract of this function.
        let code = unsafe {
            (self.machine.api.cuLaunchKernel)(
                function.0 as CUfunction,
                x,
                y,
                z,
                block,
                1,
                1,
                shared_bytes,
                stream(on),
                pointers.as_mut_ptr(),
                null_mut(),
            )
        };
        self.check("cuLaunchKernel", code)
    }

    fn algorithms(&self, problem: &GemmProblem, workspace_bytes: usize) -> Result<Vec<Algorithm>> {
        self.cublaslt()?.algorithms(problem, workspace_bytes)
    }

    fn prepare(&self, problem: &GemmProblem, algorithm: &Algorithm) -> Result<GemmHandle> {
        self.cublaslt()?.prepare(problem, algorithm)
    }

    unsafe fn multiply(&self, problem: GemmHandle, at: GemmAddresses, on: StreamHandle) -> Result {
        // SAFETY: by the contract of this function.
        unsafe { self.cublaslt()?.multiply(problem, at, on) }
    }

    fn has_engines(&self) -> bool {
        self.cudnn.is_some()
    }

    fn engines(&self, operation: &Operation, workspace_bytes: usize) -> Result<Vec<Engine>> {
        self.cudnn.as_ref().map_or(Ok(vec![]), |c| c.engines(operation, workspace_bytes))
    }

    fn plan(
        &self,
        operation: &Operation,
        engine: &Engine,
        workspace_bytes: usize,
    ) -> Result<(OperationHandle, usize)> {
        self.cudnn()?.prepare(operation, engine, workspace_bytes)
    }

    unsafe fn execute(
        &self,
        operation: OperationHandle,
        at: &[Address],
        workspace: Address,
        on: StreamHandle,
    ) -> Result {
        // SAFETY: by the contract of this function.
        unsafe { self.cudnn()?.execute(operation, at, workspace, on) }
    }

    fn begin_capture(&self, on: StreamHandle) -> Result {
        // Calls of other threads do not affect the capture.
        let mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: streams are never destroyed.
        let code = unsafe { (self.machine.api.cuStreamBeginCapture_v2)(stream(on), mode) };
        self.check("cuStreamBeginCapture", code)
    }

    fn end_capture(&self, on: StreamHandle) -> Result<GraphHandle> {
        let api = &self.machine.api;
        let mut graph: CUgraph = null_mut();
        let mut ready: CUgraphExec = null_mut();
        // SAFETY: the pointers are valid; the graph is destroyed once and used no more.
        unsafe {
            let code = (api.cuStreamEndCapture)(stream(on), &mut graph);
            self.check("cuStreamEndCapture", code)?;
            let code =
                (api.cuGraphInstantiateWithFlags)(&mut ready, graph, GRAPH_USE_NODE_PRIORITY);
            self.check("cuGraphInstantiate", code)?;
            self.check("cuGraphDestroy", (api.cuGraphDestroy)(graph))?;
            self.check("cuGraphUpload", (api.cuGraphUpload)(ready, stream(on)))?;
        }
        let graph = GraphHandle(ready as usize);
        self.graphs.borrow_mut().push(graph);
        Ok(graph)
    }

    fn destroy_graph(&self, graph: GraphHandle) -> Result {
        let mut graphs = self.graphs.borrow_mut();
        let Some(at) = graphs.iter().position(|other| *other == graph) else { return Ok(()) };
        graphs.swap_remove(at);
        // SAFETY: the graph was captured, and is launched no more.
        let code = unsafe { (self.machine.api.cuGraphExecDestroy)(graph.0 as CUgraphExec) };
        self.check("cuGraphExecDestroy", code)
    }

    fn launch_graph(&self, graph: GraphHandle, on: StreamHandle) -> Result {
        // SAFETY: the graph was captured, and is not destroyed.
        let code = unsafe { (self.machine.api.cuGraphLaunch)(graph.0 as CUgraphExec, stream(on)) };
        self.check("cuGraphLaunch", code)
    }

    fn create_team(&self, team: Team) -> Result<TeamHandle> {
        self.nccl()?.create_team(team)
    }

    fn collective(&self, collective: &Collective, on: StreamHandle) -> Result {
        self.nccl()?.collective(collective, on)
    }

    fn communication_error(&self) -> Option<String> {
        self.nccl.as_ref()?.asynchronous_error()
    }

    fn abort(&self) {
        let Some(nccl) = &self.nccl else { return };
        let (make_current, destroy) =
            (self.machine.api.cuCtxSetCurrent, self.machine.api.cuGraphExecDestroy);
        let (context, graphs) = (self.context as usize, self.graphs.take());
        // SAFETY: the context lives as long as the process.
        let enter = move || _ = unsafe { make_current(context as CUcontext) };
        nccl.abort(enter, move || {
            for graph in graphs {
                // SAFETY: the graph was captured, and is launched no more. Its result is irrelevant.
                unsafe { destroy(graph.0 as CUgraphExec) };
            }
        });
    }
}
