//! Builder for one launch of a CUDA C++ kernel.

use frit_ir::DType;
use frit_ir::plan::{self, Argument, Launch, Pointer};

/// Default threads per block.
const BLOCK: u32 = 256;
/// Maximum blocks of a kernel with a grid-stride loop: enough to fill any GPU several times.
const MOST_BLOCKS: usize = 4096;
/// Maximum axes of the `Axes` structure of the kernels.
const MAX_AXES: usize = 8;

/// Builder for a [`plan::SourceKernel`].
#[derive(Clone, Debug)]
pub(super) struct SourceKernel {
    file: &'static str,
    defines: Vec<(&'static str, String)>,
    entry: &'static str,
    pub(super) grid: [u32; 3],
    pub(super) block: u32,
    pub(super) shared_bytes: u32,
    pub(super) arguments: Vec<Argument>,
}

impl SourceKernel {
    /// A kernel of one block.
    pub(super) fn new(file: &'static str, entry: &'static str) -> SourceKernel {
        SourceKernel {
            file,
            defines: Vec::new(),
            entry,
            grid: [1; 3],
            block: BLOCK,
            shared_bytes: 0,
            arguments: Vec::new(),
        }
    }

    /// Defines a macro.
    pub(super) fn define(mut self, name: &'static str, value: impl ToString) -> Self {
        self.defines.push((name, value.to_string()));
        self
    }

    /// Sets the number of blocks of a kernel with a grid-stride loop: at least one, at most [`MOST_BLOCKS`].
    pub(super) fn blocks(mut self, blocks: usize) -> Self {
        self.grid[0] = blocks.clamp(1, MOST_BLOCKS) as u32;
        self
    }

    /// Sets the exact number of blocks; `None` if a grid cannot have that many.
    pub(super) fn grid(mut self, blocks: usize) -> Option<Self> {
        self.grid[0] = i32::try_from(blocks).ok()? as u32;
        Some(self)
    }

    /// Sets enough blocks for this many threads.
    pub(super) fn threads(self, threads: usize) -> Self {
        let block = self.block as usize;
        self.blocks(threads.div_ceil(block))
    }

    /// The launch of the kernel.
    pub(super) fn launch(self) -> Launch {
        let SourceKernel { file, defines, entry, grid, block, shared_bytes, arguments } = self;
        let defines = defines.into_iter().map(|(name, value)| (name.to_string(), value)).collect();
        let (file, entry) = (file.to_string(), entry.to_string());
        Launch::Source(plan::SourceKernel {
            file,
            defines,
            entry,
            grid,
            block,
            shared_bytes,
            arguments,
        })
    }

    pub(super) fn pointer(mut self, pointer: Pointer) -> Self {
        self.arguments.push(Argument::Pointer(pointer));
        self
    }

    pub(super) fn pointers(mut self, pointers: impl IntoIterator<Item = Pointer>) -> Self {
        self.arguments.extend(pointers.into_iter().map(Argument::Pointer));
        self
    }

    pub(super) fn i64(mut self, value: usize) -> Self {
        self.arguments.push(Argument::I64(value as i64));
        self
    }

    pub(super) fn f64(mut self, value: f64) -> Self {
        self.arguments.push(Argument::F64(value));
        self
    }

    /// The structure `Axes`: sizes and strides of at most eight axes.
    pub(super) fn axes(mut self, axes: &[(usize, isize)]) -> Option<Self> {
        if axes.len() > MAX_AXES {
            return None;
        }
        let mut words = vec![0; 1 + 2 * MAX_AXES];
        words[0] = axes.len() as i64;
        for (i, &(size, stride)) in axes.iter().enumerate() {
            words[1 + i] = size as i64;
            words[1 + MAX_AXES + i] = stride as i64;
        }
        self.arguments.push(Argument::Words(words));
        Some(self)
    }
}

/// The C++ type of elements; `None` if no kernel supports it.
pub(super) fn c_type(dtype: DType) -> Option<&'static str> {
    match dtype {
        DType::Bool => Some("b8"),
        DType::F8E4M3 | DType::F8E5M2 => None,
        other => Some(other.name()),
    }
}

/// The C++ type of vector accesses of this many bytes.
pub(super) fn c_bytes(bytes: usize) -> Option<&'static str> {
    match bytes {
        1 => Some("u8"),
        2 => Some("u16"),
        4 => Some("u32"),
        8 => Some("u64"),
        16 => Some("u128"),
        _ => None,
    }
}
