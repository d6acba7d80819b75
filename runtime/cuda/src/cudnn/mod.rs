//! cuDNN through its graph interface: Frit describes an operation, and the library has engines for it. Optional:
//! without it a plan runs on Frit's own kernels.

mod attention;
mod batch_norm;
mod described;
mod descriptor;
mod engines;
pub mod nodes;
mod operations;
mod pool;

pub use attention::nodes as attention_nodes;
pub use engines::Engine;

use super::cublaslt;
use super::driver::{Address, OperationHandle, StreamHandle};
use super::library::Wanted;
use super::nvrtc;
use descriptor::{Api, DEVICE_JSON, Descriptor, Kind, Result};
use engines::{Planned, Target};
use frit_ir::plan::Operation;
use std::cell::RefCell;
use std::ptr::null_mut;
use std::rc::Rc;

/// The library.
const LIBCUDNN: Wanted = Wanted {
    what: "cuDNN",
    names: &["libcudnn.so.9"],
    companion: None,
    remedy: "optional: `pip install nvidia-cudnn-cu12`; without it Frit's own kernels run",
};

/// The library, opened for a device.
pub struct Cudnn {
    api: Rc<Api>,
    /// Where it was found.
    pub path: String,
    /// Its version, such as 92600 for 9.26.0.
    pub version: usize,
    target: Target,
    /// Prepared operations.
    planned: RefCell<Vec<(Operation, Engine, Planned)>>,
}

/// Loads the library and its dependencies, for a driver of this version of CUDA.
fn load(driver: (u32, u32)) -> Result<(Rc<Api>, String, usize)> {
    // It opens both by name, and works without them.
    let _ = nvrtc::library(driver).load();
    let _ = cublaslt::library(driver).load();
    let loaded = LIBCUDNN.load()?;
    let api = Rc::new(Api::load(&loaded)?);
    // SAFETY: no arguments to get wrong.
    let version = unsafe { (api.cudnnGetVersion)() };
    Ok((api, loaded.path, version))
}

/// Where it is, and its version.
///
/// # Errors
/// If it is missing or too old.
pub(super) fn find(driver: (u32, u32)) -> Result<(String, usize)> {
    load(driver).map(|(_, path, version)| (path, version))
}

impl Cudnn {
    /// Opens the library for the device whose context is current.
    ///
    /// # Errors
    /// If it is missing or too old, or does not support the device.
    pub(super) fn open(driver: (u32, u32)) -> Result<Cudnn> {
        let (api, path, version) = load(driver)?;
        let mut handle = null_mut();
        // SAFETY: the pointer is valid.
        let code = unsafe { (api.cudnnCreate)(&mut handle) };
        api.check("cudnnCreate", code)?;
        let target = Target::Handle(handle);
        Ok(Cudnn { api, path, version, target, planned: RefCell::default() })
    }

    /// Opens the library for a device described by cuDNN's JSON, which need not exist: engines can be found and
    /// prepared, but not run. Needs version 9.8.
    ///
    /// # Errors
    /// If it is missing or too old, or does not accept the description.
    pub fn for_described(device: &str) -> Result<Cudnn> {
        let (api, path, version) = load((u32::MAX, 0))?;
        let mut described = Descriptor::new(&api, Kind::DeviceProperties)?;
        described.set(&DEVICE_JSON, device.as_bytes())?;
        let target = Target::Described(described.finalize()?);
        Ok(Cudnn { api, path, version, target, planned: RefCell::default() })
    }

    /// Name and version.
    pub(super) fn name(&self) -> String {
        format!("cuDNN {}", self.version)
    }

    /// Engines for an operation within `workspace_bytes`, in order of expected speed.
    ///
    /// # Errors
    /// The library's message for an unsupported operation.
    pub fn engines(&self, operation: &Operation, workspace_bytes: usize) -> Result<Vec<Engine>> {
        let graph = operations::graph(&self.api, self.target.handle(), operation)?;
        engines::find(&self.api, &self.target, (&graph, operation), workspace_bytes)
    }

    /// Prepares an engine for an operation; also returns the workspace that it needs.
    ///
    /// # Errors
    /// If the library refuses it, or it needs more workspace.
    pub fn prepare(
        &self,
        operation: &Operation,
        engine: &Engine,
        workspace_bytes: usize,
    ) -> Result<(OperationHandle, usize)> {
        let known =
            |(op, with, _): &(Operation, Engine, Planned)| op == operation && with == engine;
        if let Some(i) = self.planned.borrow().iter().position(known) {
            return Ok((OperationHandle(i), self.planned.borrow()[i].2.workspace_bytes));
        }
        let graph = operations::graph(&self.api, self.target.handle(), operation)?;
        let made =
            engines::plan(&self.api, &self.target, (graph, operation), engine, workspace_bytes)?;
        let needed = made.workspace_bytes;
        let mut planned = self.planned.borrow_mut();
        planned.push((operation.clone(), engine.clone(), made));
        Ok((OperationHandle(planned.len() - 1), needed))
    }

    /// Enqueues an operation; `at` are the addresses of its tensors.
    ///
    /// # Safety
    /// The addresses must be valid when it runs.
    ///
    /// # Errors
    /// If the library refuses.
    pub(super) unsafe fn execute(
        &self,
        operation: OperationHandle,
        at: &[Address],
        workspace: Address,
        on: StreamHandle,
    ) -> Result {
        let handle = self.target.handle();
        // SAFETY: streams are never destroyed, and the handle was created.
        let code = unsafe { (self.api.cudnnSetStream)(handle, super::real::stream(on).cast()) };
        self.api.check("cudnnSetStream", code)?;
        // SAFETY: by the contract of this function.
        unsafe { self.planned.borrow()[operation.0].2.execute(&self.api, handle, at, workspace) }
    }
}
