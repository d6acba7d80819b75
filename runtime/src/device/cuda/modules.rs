//! Loaded code of a plan's kernels.

use super::cubins::Cubins;
use super::survey::Survey;
use crate::RunError;
use frit_cuda::CudaError;
use frit_cuda::driver::{Driver, FunctionHandle, ModuleHandle, Source};
use frit_ir::plan::{CudaLaunch, SourceKernel, layout};
use frit_kernels::cuda::source;
use std::cell::RefCell;
use std::collections::HashMap;

/// CUDA C++ by its file and preprocessor definitions.
type Unit = (String, Vec<(String, String)>);

/// Every module that a plan's kernels need.
pub(super) struct Modules {
    /// The plan's generated module.
    generated: Option<ModuleHandle>,
    sources: HashMap<Unit, ModuleHandle>,
    functions: RefCell<HashMap<(ModuleHandle, String, u32), FunctionHandle>>,
    /// Resident blocks of a kernel on the device.
    resident: RefCell<HashMap<FunctionHandle, u32>>,
}

impl Modules {
    /// Compiles sources that are not cached, and loads all modules. `ptx` is the plan's generated module with its file
    /// name.
    ///
    /// # Errors
    /// Code that cannot be compiled or loaded.
    pub(super) fn load(
        survey: &Survey<'_>,
        driver: &impl Driver,
        ptx: Option<(&str, &str)>,
        cubins: &Cubins,
    ) -> Result<Modules, CudaError> {
        let generated = ptx.map(|(file, text)| driver.load(file, text.as_bytes())).transpose()?;
        let mut units: Vec<Unit> = Vec::new();
        for kernel in survey.sources() {
            let unit = (kernel.file.clone(), kernel.defines.clone());
            if !units.contains(&unit) {
                units.push(unit);
            }
        }
        let mut texts = Vec::with_capacity(units.len());
        for (file, defines) in &units {
            let text = source(file).ok_or_else(|| CudaError::Compile {
                file: file.clone(),
                compiler: "Frit".into(),
                reason: "no such source".into(),
            })?;
            texts.push(Source { file, text, defines });
        }
        let codes = cubins.code(driver, &texts)?;
        let mut sources = HashMap::new();
        for (unit, code) in units.into_iter().zip(codes) {
            let module = driver.load(&format!("{}.cu", unit.0), &code)?;
            sources.insert(unit, module);
        }
        let (functions, resident) = (RefCell::default(), RefCell::default());
        Ok(Modules { generated, sources, functions, resident })
    }

    /// A kernel of the plan's generated module.
    ///
    /// # Errors
    /// If the module does not have it, or the device has too little shared memory.
    pub(super) fn generated(
        &self,
        driver: &impl Driver,
        launch: &CudaLaunch,
    ) -> Result<FunctionHandle, RunError> {
        let module = self.generated.ok_or_else(|| RunError::Plan {
            path: layout::PLAN.into(),
            reason: "the plan names no file with its kernels".into(),
        })?;
        Ok(self.function(driver, module, &launch.symbol, launch.shared_bytes)?)
    }

    /// A kernel of CUDA C++.
    ///
    /// # Errors
    /// If its module does not have it, or the device has too little shared memory.
    pub(super) fn source(
        &self,
        driver: &impl Driver,
        kernel: &SourceKernel,
    ) -> Result<FunctionHandle, CudaError> {
        let module = self.sources[&(kernel.file.clone(), kernel.defines.clone())];
        self.function(driver, module, &kernel.entry, kernel.shared_bytes)
    }

    /// Resident blocks of a kernel of the plan with `block` threads each; cached.
    ///
    /// # Errors
    /// If the driver call fails.
    pub(super) fn resident_blocks(
        &self,
        driver: &impl Driver,
        function: FunctionHandle,
        block: u32,
    ) -> Result<u32, CudaError> {
        if let Some(blocks) = self.resident.borrow().get(&function) {
            return Ok(*blocks);
        }
        let blocks = driver.resident_blocks(function, block)?.max(1);
        self.resident.borrow_mut().insert(function, blocks);
        Ok(blocks)
    }

    /// A kernel of a module; cached.
    fn function(
        &self,
        driver: &impl Driver,
        module: ModuleHandle,
        name: &str,
        shared_bytes: u32,
    ) -> Result<FunctionHandle, CudaError> {
        let key = (module, name.to_string(), shared_bytes);
        if let Some(function) = self.functions.borrow().get(&key) {
            return Ok(*function);
        }
        let function = driver.function(module, name, shared_bytes)?;
        self.functions.borrow_mut().insert(key, function);
        Ok(function)
    }
}
