//! Selection for pooling and its gradients.

mod cudnn;

use crate::assembler::Assembler;
use crate::last;
use crate::routine::elem;
use crate::source::SourceKernel;
use crate::source::c_type;
use crate::window::window;
use cudnn::Pool;
use frit_ir::ops::Window;
use frit_ir::plan::{Argument, Pointer, PoolFunction};
use frit_ir::{DType, Graph, Node, Op, TensorType, ValueId};
use frit_kernels::routine::Routine;
use frit_kernels::routine::pooling::Pooling;

/// What the kernels count in `i32` is less than this by more than the threads of a grid.
const MOST_I32: usize = (1 << 31) - (1 << 21);

/// The numbers of a `Window` of the kernels: image sizes, output positions, taps, strides, dilations and padding.
fn numbers(window: &Window, input: &[usize], taps: &[usize]) -> Option<Vec<i64>> {
    let output = window.positions(input, taps).ok()?;
    let all = [input, &output, taps, &window.strides, &window.dilations, &window.low];
    Some(all.iter().flat_map(|list| list.iter().map(|n| *n as i64)).collect())
}

impl SourceKernel {
    /// The structure `Window` of the kernels.
    pub(super) fn window(
        mut self,
        window: &Window,
        input: &[usize],
        taps: &[usize],
    ) -> Option<Self> {
        self.arguments.push(Argument::Words(numbers(window, input, taps)?));
        Some(self)
    }

    /// Defines the numbers of a `Window` that is known when the kernel is compiled.
    pub(super) fn fixed_window(
        self,
        window: &Window,
        input: &[usize],
        taps: &[usize],
    ) -> Option<Self> {
        let numbers: Vec<String> =
            numbers(window, input, taps)?.iter().map(i64::to_string).collect();
        Some(self.define("RANK", input.len()).define("WINDOW", numbers.join(",")))
    }
}

/// Pooling of images by `pool.cu`.
struct Kernels<'a> {
    pool: &'a Pool<'a>,
    images: usize,
    positions: Vec<usize>,
}

impl Kernels<'_> {
    fn size(&self) -> &[usize] {
        &self.pool.image.shape.dims()[2..]
    }

    /// Windows of all images.
    fn outputs(&self) -> usize {
        self.images * self.positions.iter().product::<usize>()
    }

    /// The type that counts the elements of all images with what windows have of their padding.
    fn index(&self) -> &'static str {
        let Pool { window, taps, .. } = self.pool;
        let padded = |axis: usize| {
            let windows = (self.positions[axis] - 1).checked_mul(window.strides[axis])?;
            let taps = (taps[axis] - 1).checked_mul(window.dilations[axis])?;
            let end = windows.checked_add(taps)?.max(self.size()[axis] + window.low[axis]);
            // The kernels also count to the next step of either kind.
            end.checked_add(window.strides[axis])?.checked_add(window.dilations[axis])
        };
        let all = (0..taps.len()).try_fold(self.images, |n, axis| n.checked_mul(padded(axis)?));
        if all.is_some_and(|n| n < MOST_I32) { "i32" } else { "i64" }
    }

    /// The type that counts taps.
    fn place(&self) -> Option<DType> {
        let taps: usize = self.pool.taps.iter().product();
        match taps {
            0..=0x100 => Some(DType::U8),
            _ => i32::try_from(taps).ok().map(|_| DType::I32),
        }
    }

    /// Neighbors of a row that a thread of a gradient computes: by one access, and each under the same taps in all rows.
    fn width(&self) -> usize {
        let Pool { window, image, .. } = self.pool;
        let (Some(row), Some(stride)) = (self.size().last(), window.strides.last()) else {
            return 1;
        };
        let most = 16 / image.dtype.size();
        let fits = |w: &usize| row.is_multiple_of(*w) && w.is_multiple_of(*stride);
        (0..).map(|i| most >> i).take_while(|w| *w > 0).find(fits).unwrap_or(1)
    }

    fn kernel(&self, entry: &'static str) -> Option<SourceKernel> {
        let Pool { window, taps, image } = self.pool;
        let kernel = SourceKernel::new("pool", entry)
            .define("T", c_type(image.dtype)?)
            .fixed_window(window, self.size(), taps)?
            .define("INDEX", self.index())
            .define("PLACE", c_type(self.place()?)?)
            .define("WIDTH", self.width());
        Some(kernel)
    }

    /// A kernel with a thread per window.
    fn forward(&self, entry: &'static str, to: Pointer, x: Pointer) -> Option<SourceKernel> {
        Some(self.kernel(entry)?.threads(self.outputs()).pointer(to).pointer(x).i64(self.images))
    }

    /// A gradient that reads these.
    fn gradient(
        &self,
        entry: &'static str,
        to: Pointer,
        reads: &[Pointer],
    ) -> Option<SourceKernel> {
        let threads = self.pool.image.shape.numel() / self.width();
        let kernel = self.kernel(entry)?.threads(threads).pointer(to);
        Some(kernel.pointers(reads.iter().copied()).i64(self.images))
    }
}

pub(super) fn cuda(a: &mut Assembler<'_>, node: &Node) -> Option<()> {
    let (window, taps, image) = pooled(a, node)?;
    let to = a.write(node.outputs[0]);
    let operands: Vec<_> = node.inputs.iter().map(|v| a.read(*v)).collect::<Option<_>>()?;
    if image.shape.dims()[..2].contains(&0) {
        return Some(());
    }
    let begin = a.launches();
    let pool = Pool { window, taps, image };
    pool.launches(a, &node.op, &operands, to)?;
    match &node.op {
        Op::MaxPool(_) => pool.candidate(a, PoolFunction::Max, [operands[0], to], begin),
        Op::SumPool(_) => pool.candidate(a, PoolFunction::Sum, [operands[0], to], begin),
        Op::SumPoolGrad(_) => pool.candidate(a, PoolFunction::SumGrad, [to, operands[0]], begin),
        _ => {}
    }
    Some(())
}

/// The launches of a body that is a pooling between transposes of all its images: over the channels as well, one at a time, of
/// images with one channel.
pub(super) fn cuda_channels_last(a: &mut Assembler<'_>, body: &Graph) -> Option<()> {
    let node = last::between_transposes(body)?;
    let (window, taps, image) = pooled(a, node)?;
    // The kernels have one layout for all images.
    let held = |image: ValueId, held: Option<ValueId>| {
        held.filter(|held| last::lies_last(body, image, *held))
    };
    let reads = node.inputs.iter().map(|v| a.read(held(*v, last::operand(body, *v))?));
    let operands: Vec<_> = reads.collect::<Option<_>>()?;
    let y = node.outputs[0];
    let to = a.write(held(y, last::result(body, y))?);
    let dims = image.shape.dims();
    if image.shape.numel() == 0 {
        return None;
    }
    let with = |list: &[usize], of_channels: usize| [list, &[of_channels]].concat();
    let window = Window {
        strides: with(&window.strides, 1),
        dilations: with(&window.dilations, 1),
        low: with(&window.low, 0),
        high: with(&window.high, 0),
    };
    let lying = [&[dims[0], 1], &dims[2..], &[dims[1]]].concat();
    let image = TensorType::new(image.dtype, lying);
    let pool = Pool { window: &window, taps: &with(taps, 1), image: &image };
    pool.launches(a, &node.op, &operands, to)
}

/// The window, its taps and the images of a pooling: the operand, or the result of a gradient.
fn pooled<'a>(
    a: &Assembler<'a>,
    node: &'a Node,
) -> Option<(&'a Window, &'a [usize], &'a TensorType)> {
    match &node.op {
        Op::MaxPool(op) => Some((&op.window, &op.taps, a.ty(node.inputs[0]))),
        Op::SumPool(op) => Some((&op.window, &op.taps, a.ty(node.inputs[0]))),
        Op::MaxPoolGrad(op) => Some((&op.window, &op.taps, a.ty(node.outputs[0]))),
        Op::SumPoolGrad(op) => Some((&op.window, &op.taps, a.ty(node.outputs[0]))),
        _ => None,
    }
}

impl Pool<'_> {
    /// Launches of kernels.
    fn launches(
        &self,
        a: &mut Assembler<'_>,
        op: &Op,
        operands: &[Pointer],
        to: Pointer,
    ) -> Option<()> {
        let dims = self.image.shape.dims();
        let positions = self.window.positions(&dims[2..], self.taps).ok()?;
        let kernels = Kernels { pool: self, images: dims[0] * dims[1], positions };
        match op {
            Op::MaxPool(_) => a.run(kernels.forward("max_pool", to, operands[0])?),
            Op::SumPool(_) => a.run(kernels.forward("sum_pool", to, operands[0])?),
            Op::MaxPoolGrad(_) => {
                let places = a.scratch(kernels.outputs() * kernels.place()?.size());
                a.run(kernels.forward("max_pool_places", places, operands[1])?);
                a.run(kernels.gradient("max_pool_grad", to, &[operands[0], places])?);
            }
            _ => a.run(kernels.gradient("sum_pool_grad", to, operands)?),
        }
        Some(())
    }
}

pub(super) fn cpu(op: &Op, ins: &[&TensorType], outs: &[&TensorType]) -> Option<Routine> {
    let (sliding, taps, x) = match op {
        Op::MaxPool(op) => (&op.window, &op.taps, ins[0]),
        Op::SumPool(op) => (&op.window, &op.taps, ins[0]),
        Op::MaxPoolGrad(op) => (&op.window, &op.taps, outs[0]),
        Op::SumPoolGrad(op) => (&op.window, &op.taps, outs[0]),
        _ => return None,
    };
    let dims = x.shape.dims();
    let pooling = Pooling {
        elem: elem(x.dtype)?,
        images: dims[0] * dims[1],
        window: window(sliding, &dims[2..], taps)?,
    };
    Some(match op {
        Op::MaxPool(_) => Routine::MaxPool(pooling),
        Op::MaxPoolGrad(_) => Routine::MaxPoolGrad(pooling),
        Op::SumPool(_) => Routine::SumPool(pooling),
        _ => Routine::SumPoolGrad(pooling),
    })
}
