//! Convolutions of images with few channels, such as colors: the images are folded, so that the steps of a window become
//! channels (`conv_fold.cu`), and lie channels last in whole vectors.

use crate::assembler::Assembler;
use crate::conv::Conv;
use crate::conv::cudnn::VECTOR;
use crate::source::{SourceKernel, c_type};
use frit_ir::ops::Window;
use frit_ir::plan::Pointer;
use frit_ir::{DType, Op};

/// The sizes of a folded convolution.
struct Folded {
    /// Places of a step, by axis.
    steps: Vec<usize>,
    /// Channels in whole vectors.
    channels: usize,
    size: Vec<usize>,
    taps: Vec<usize>,
    window: Window,
}

impl Folded {
    /// Those of a convolution; `None` if its window lies in the padding only.
    fn of(conv: &Conv<'_>) -> Option<Folded> {
        let Conv { window, size, taps, .. } = conv;
        let positions = window.positions(size, taps).ok()?;
        let rank = size.len();
        let is_dense = window.dilations.iter().all(|n| *n == 1);
        let steps: Vec<usize> = if is_dense { window.strides.clone() } else { vec![1; rank] };
        let channels = conv.channels * steps.iter().product::<usize>();
        let mut folded = Folded {
            channels: channels.next_multiple_of(VECTOR),
            size: size.to_vec(),
            taps: taps.to_vec(),
            window: (*window).clone(),
            steps,
        };
        for axis in (0..rank).filter(|_| is_dense) {
            let (step, low) = (folded.steps[axis], window.low[axis]);
            let before = low.div_ceil(step);
            folded.taps[axis] = (taps[axis] - 1 + before * step - low) / step + 1;
            // Places that some position has under a tap.
            let needed = (positions[axis] - 1 + folded.taps[axis]).checked_sub(before)?;
            folded.size[axis] = size[axis].div_ceil(step).min(needed);
            folded.window.low[axis] = before;
            folded.window.high[axis] = needed - folded.size[axis];
            folded.window.strides[axis] = 1;
        }
        (!folded.size.contains(&0)).then_some(folded)
    }

    /// A kernel that folds what has these sizes into these.
    fn kernel(
        &self,
        conv: &Conv<'_>,
        entry: &'static str,
        dtype: DType,
        [size, folded]: [&[usize]; 2],
    ) -> Option<SourceKernel> {
        let is_dense = conv.window.dilations.iter().all(|n| *n == 1);
        let list =
            |numbers: &[usize]| numbers.iter().map(usize::to_string).collect::<Vec<_>>().join(",");
        // Without folding, taps keep their places.
        let zeros = vec![0; size.len()];
        let low = if is_dense { &conv.window.low } else { &zeros };
        let shift = if is_dense { &self.window.low } else { &zeros };
        let fits = |places: &[usize], channels: usize| {
            let elements = places.iter().try_fold(channels, |n, size| n.checked_mul(*size));
            elements.is_some_and(|n| i32::try_from(n).is_ok())
        };
        if !fits(size, conv.channels) || !fits(folded, self.channels) {
            return None;
        }
        let kernel = SourceKernel::new("conv_fold", entry)
            .define("T", c_type(dtype)?)
            .define("RANK", size.len())
            .define("C", conv.channels)
            .define("P", self.channels)
            .define("WIDTH", VECTOR.min(16 / dtype.size()))
            .define("SIZE", list(size))
            .define("FOLDED", list(folded))
            .define("STEP", list(&self.steps))
            .define("LOW", list(low))
            .define("SHIFT", list(shift));
        Some(kernel)
    }
}

impl Conv<'_> {
    /// The launches of a convolution, or the gradient of its weight, where images and kernels are `[N, C, …]`, and responses lie
    /// channels last.
    pub(super) fn folded(
        &self,
        a: &mut Assembler<'_>,
        op: &Op,
        [first, second]: [Pointer; 2],
        to: Pointer,
    ) -> Option<()> {
        let folded = Folded::of(self)?;
        let conv = Conv {
            window: &folded.window,
            channels: folded.channels,
            size: &folded.size,
            taps: &folded.taps,
            ..*self
        };
        let of_taps = [self.taps, conv.taps];
        let elements = |n: usize, of: &[usize]| n * of.iter().product::<usize>() * conv.channels;
        let mut fold = |entry, from, [n, width]: [usize; 2], sizes: [&[usize]; 2]| {
            let count = elements(n, sizes[1]);
            let at = a.scratch(count * self.element.size());
            let kernel = folded.kernel(self, entry, self.element, sizes)?.threads(count / width);
            a.run(kernel.pointer(at).pointer(from).i64(n));
            Some(at)
        };
        let of_images = [self.images, VECTOR.min(16 / self.element.size())];
        match op {
            Op::Conv(_) => {
                let images = fold("fold_images", first, of_images, [self.size, conv.size])?;
                let kernels = fold("fold_kernels", second, [self.filters, 1], of_taps)?;
                conv.last(a, op, [images, kernels], to)
            }
            Op::ConvGradWeight(_) => {
                let images = fold("fold_images", second, of_images, [self.size, conv.size])?;
                let gradient = a.scratch(elements(self.filters, conv.taps) * self.out.size());
                conv.last(a, op, [first, images], gradient)?;
                let n = self.filters * self.channels * self.taps.iter().product::<usize>();
                let kernel = folded.kernel(self, "unfold_kernels", self.out, of_taps)?.threads(n);
                a.run(kernel.pointer(to).pointer(gradient).i64(self.filters));
                Some(())
            }
            _ => None,
        }
    }
}
