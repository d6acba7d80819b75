//! What kernels of a processor take beyond their arithmetic and the bytes that they move, as measured on the CPU.

use frit_ir::ops::{BinaryFn, MaxPool, MaxPoolGrad};
use frit_ir::{Graph, Node, Op, ValueId};

/// Vector operations in whose time a function such as tanh or erf is computed, by a polynomial and a division.
const FUNCTION: f64 = 70.0;
/// The same of eˣ of all elements of a row, by a polynomial.
const EXPONENTIAL: f64 = 35.0;
/// The same of an element of batch normalization, which passes several times over each channel and adds in f64, and of its gradient.
const NORMALIZED: f64 = 25.0;
const NORMALIZED_GRADIENT: f64 = 40.0;
/// The same of one tap of a maximum over a window, and of its gradient, which looks for the tap of the maximum.
const TAP: f64 = 40.0;
const TAP_GRADIENT: f64 = 90.0;

/// Memory accesses of a copy: it reads, and a line is read before it is written to.
const COPY: f64 = 3.0;
/// Those of a kernel that reads and writes as much as a copy, but writes only what it has read.
const IN_PLACE: f64 = 2.0;

/// Vector operations in whose time a node is computed, beyond its own number of operations.
pub(super) fn vector_operations(graph: &Graph, node: &Node) -> f64 {
    use BinaryFn::{GeluGrad, GeluTanhGrad, Pow, SiluGrad};
    let elements = |v: &ValueId| graph.ty(*v).shape.numel() as f64;
    let largest = || node.inputs.iter().map(elements).fold(0.0, f64::max);
    let taps = |taps: &[usize]| taps.iter().product::<usize>() as f64;
    match &node.op {
        Op::Unary(f) if f.is_transcendental() => FUNCTION * largest(),
        Op::Binary(GeluGrad | GeluTanhGrad | Pow | SiluGrad) => FUNCTION * largest(),
        Op::Softmax(_) | Op::LogSoftmax(_) | Op::CrossEntropy(_) | Op::CrossEntropyGrad(_) => {
            EXPONENTIAL * largest()
        }
        Op::BatchNorm(_) => NORMALIZED * elements(&node.inputs[0]),
        Op::BatchNormGrad(_) => NORMALIZED_GRADIENT * elements(&node.inputs[0]),
        Op::MaxPool(MaxPool { taps: of, .. }) => TAP * taps(of) * elements(&node.outputs[0]),
        Op::MaxPoolGrad(MaxPoolGrad { taps: of, .. }) => {
            TAP_GRADIENT * taps(of) * elements(&node.inputs[0])
        }
        _ => 0.0,
    }
}

/// The bytes of a copy that takes as long as the traffic of a kernel that moves this many.
pub(super) fn traffic(body: &Graph, bytes: f64) -> f64 {
    let is_in_place = body.nodes().any(|(_, n)| matches!(n.op, Op::OptimizerStep(_) | Op::EmaStep));
    if is_in_place { IN_PLACE / COPY * bytes } else { bytes }
}

/// Whether a kernel waits for memory and computes in turn: it reads a whole channel before the first result.
pub(super) fn is_in_phases(body: &Graph) -> bool {
    body.nodes().any(|(_, n)| matches!(n.op, Op::BatchNorm(_) | Op::BatchNormGrad(_)))
}
