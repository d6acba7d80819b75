//! Converts windows of the graph to those of the CPU kernels, which have three axes.

use frit_ir::ops::Window as Sliding;
use frit_kernels::window::Window;

/// Three axes of sizes, with leading sizes of `fill`; `None` for more than three.
fn three(sizes: &[usize], fill: usize) -> Option<[usize; 3]> {
    let mut all = [fill; 3];
    all.get_mut(3usize.checked_sub(sizes.len())?..)?.copy_from_slice(sizes);
    Some(all)
}

/// A window with these taps over images of this size.
pub(super) fn window(sliding: &Sliding, input: &[usize], taps: &[usize]) -> Option<Window> {
    let output = sliding.positions(input, taps).ok()?;
    Some(Window {
        input: three(input, 1)?,
        output: three(&output, 1)?,
        taps: three(taps, 1)?,
        strides: three(&sliding.strides, 1)?,
        dilations: three(&sliding.dilations, 1)?,
        low: three(&sliding.low, 0)?,
    })
}
