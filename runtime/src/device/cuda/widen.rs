//! Inputs with narrower data: transferred as they are and widened on the device.

use super::cubins::Cubins;
use frit_cuda::CudaError;
use frit_cuda::driver::{Address, Arguments, Driver, FunctionHandle, Shape, Source, StreamHandle};
use frit_data::Element;
use frit_ir::DType;
use frit_kernels::cuda::source;
use std::collections::HashMap;

/// The kernel: its file, and its name.
const KERNEL: &str = "convert";
/// Threads per block, maximum elements per thread, and maximum blocks.
const BLOCK: u32 = 256;
const WIDTH: usize = 8;
const MOST_BLOCKS: usize = 4096;

/// The prepared kernels.
pub(super) struct Widening {
    cubins: Cubins,
    kernels: HashMap<(Element, DType), FunctionHandle>,
}

impl Widening {
    pub(super) fn new(cubins: Cubins) -> Widening {
        Widening { cubins, kernels: HashMap::new() }
    }

    /// Prepares the kernel for a pair of types, if it is not prepared yet.
    ///
    /// # Errors
    /// If it cannot be compiled or loaded.
    pub(super) fn prepare(
        &mut self,
        driver: &impl Driver,
        from: Element,
        to: DType,
    ) -> Result<(), CudaError> {
        if self.kernels.contains_key(&(from, to)) {
            return Ok(());
        }
        let name = if from == Element::Bool { "b8" } else { from.name() };
        let to_name = if to == DType::Bool { "b8" } else { to.name() };
        let defines =
            [("FROM", name), ("TO", to_name)].map(|(k, v)| (k.to_string(), v.to_string()));
        let text = source(KERNEL).expect("invariant: there is such a source");
        let code = self.cubins.code(driver, &[Source { file: KERNEL, text, defines: &defines }])?;
        let module = driver.load(&format!("{KERNEL}.cu"), &code[0])?;
        self.kernels.insert((from, to), driver.function(module, KERNEL, 0)?);
        Ok(())
    }

    /// Converts `n` elements on a stream; the kernel must be prepared.
    ///
    /// # Errors
    /// If the driver refuses.
    ///
    /// # Safety
    /// The addresses must be valid for the elements when it runs.
    pub(super) unsafe fn launch(
        &self,
        driver: &impl Driver,
        (from, from_type): (Address, Element),
        (to, to_type): (Address, DType),
        n: usize,
        on: StreamHandle,
    ) -> Result<(), CudaError> {
        let mut arguments = Arguments::default();
        [to, from, n as u64].into_iter().for_each(|word| arguments.push(word));
        let blocks = n.div_ceil(WIDTH * BLOCK as usize).clamp(1, MOST_BLOCKS) as u32;
        let shape = Shape { grid: [blocks, 1, 1], block: BLOCK, shared_bytes: 0 };
        // SAFETY: these are the kernel's parameters; the caller vouches for the addresses.
        unsafe { driver.launch(self.kernels[&(from_type, to_type)], shape, &arguments, on) }
    }
}
