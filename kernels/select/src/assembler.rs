//! Selects launches for a body: one node after the other, with intermediate values in scratch memory.

use crate::source::SourceKernel;
use crate::source::c_bytes;
use crate::{
    Selected, adafactor, attention, batch_norm, conv, convert, embedding, index, layout, matmul,
    order, pool, quantize, random, reduce,
};
use frit_ir::plan::{Candidate, CandidateName, Launch, OperationLaunch, Pointer};
use frit_ir::{Graph, Node, Op, Tensor, TensorType, ValueId};
use std::collections::HashMap;

/// Alignment of scratch memory, in bytes.
const ALIGNMENT: usize = 256;

/// Adds the launches of a node; `None` if there are none. `None`, and nothing added, if its operation belongs to
/// another family.
type Cuda = fn(&mut Assembler<'_>, &Node) -> Option<()>;

/// The families of operations that launches compute one by one.
const FAMILIES: &[Cuda] = &[
    adafactor::cuda,
    attention::cuda,
    batch_norm::cuda,
    conv::cuda,
    convert::cuda,
    embedding::cuda,
    index::cuda,
    layout::cuda,
    order::cuda,
    pool::cuda,
    quantize::cuda,
    random::cuda,
    reduce::cuda,
];

/// Adds the launches of a body; `None` if there are none. The values that they compute have places, see
/// [`Assembler::write`].
type OfBody = fn(&mut Assembler<'_>, &Graph) -> Option<()>;

/// The selectors of bodies that are computed as a whole, then that of any body.
const BODIES: &[OfBody] = &[
    attention::cuda_strided,
    matmul::epilogue::cuda,
    batch_norm::cuda_region,
    conv::cuda_channels_last,
    pool::cuda_channels_last,
    nodes,
];

/// The launches of a body by the first selector that computes it; `None` if none does.
pub(super) fn select(body: &Graph, deterministic: bool) -> Option<Selected> {
    BODIES.iter().find_map(|cuda| {
        let mut a = Assembler::new(body, deterministic);
        cuda(&mut a, body)?;
        a.results()
    })
}

/// The launches of all nodes, one after the other.
fn nodes(a: &mut Assembler<'_>, body: &Graph) -> Option<()> {
    let mut nodes: Vec<&Node> = body.nodes().map(|(_, n)| n).filter(|n| !n.op.is_leaf()).collect();
    while let Some(&node) = nodes.first() {
        let taken = matmul::cuda(a, &nodes)?;
        if taken == 0 {
            a.node(node)?;
        }
        nodes.drain(..taken.max(1));
    }
    Some(())
}

/// Builder for the launches of a body.
pub(super) struct Assembler<'a> {
    pub(super) body: &'a Graph,
    /// Whether sums are added in one order.
    pub(super) deterministic: bool,
    places: HashMap<ValueId, Pointer>,
    pub(super) selected: Selected,
}

impl<'a> Assembler<'a> {
    fn new(body: &'a Graph, deterministic: bool) -> Assembler<'a> {
        let inputs = body.nodes().map(|(_, n)| n).filter(|n| matches!(n.op, Op::Input(_)));
        let places = inputs.enumerate().map(|(i, n)| (n.outputs[0], Pointer::Read(i, 0))).collect();
        Assembler { body, deterministic, places, selected: Selected::default() }
    }

    /// The launches so far, if they compute every result of the body: selectors look at its operations, and it may return other
    /// values than these compute. A result that is an operand, or a value that is two results, is copied.
    fn results(mut self) -> Option<Selected> {
        for (i, output) in self.body.outputs.iter().enumerate() {
            let (to, from) = (Pointer::Write(i, 0), self.read(output.value)?);
            if to != from {
                self.copy_bytes(to, from, self.ty(output.value).bytes());
            }
        }
        Some(self.selected)
    }

    fn node(&mut self, node: &Node) -> Option<()> {
        if node.outputs.iter().all(|v| self.ty(*v).shape.numel() == 0) {
            for value in &node.outputs {
                self.write(*value);
            }
            return Some(());
        }
        FAMILIES.iter().find_map(|cuda| cuda(self, node))
    }

    /// Whether the body has a single operation.
    pub(super) fn is_alone(&self) -> bool {
        self.body.nodes().filter(|(_, n)| !n.op.is_leaf()).count() == 1
    }

    pub(super) fn ty(&self, value: ValueId) -> &'a TensorType {
        self.body.ty(value)
    }

    /// The location of a value; a constant of equal elements is first written to scratch memory.
    pub(super) fn read(&mut self, value: ValueId) -> Option<Pointer> {
        if let Some(place) = self.places.get(&value) {
            return Some(*place);
        }
        let element = self.splat(value)?;
        let ty = self.ty(value);
        let at = self.scratch(ty.bytes());
        self.fill(at, ty, element)?;
        self.places.insert(value, at);
        Some(at)
    }

    /// The element of a constant whose elements are all equal.
    pub(super) fn splat(&self, value: ValueId) -> Option<f64> {
        self.body.constant(value)?.as_splat()
    }

    /// Where a value is written: its result or, for an intermediate value, scratch memory.
    pub(super) fn write(&mut self, value: ValueId) -> Pointer {
        let output = self.body.outputs.iter().position(|o| o.value == value);
        let at = match output {
            Some(i) => Pointer::Write(i, 0),
            None => self.scratch(self.ty(value).bytes()),
        };
        self.places.insert(value, at);
        at
    }

    /// Whether the value is a result or is read by a node other than `reader`.
    pub(super) fn is_read_elsewhere(&self, value: ValueId, reader: &Node) -> bool {
        let reads = |n: &Node| n.inputs.iter().filter(|v| **v == value).count();
        let all: usize = self.body.nodes().map(|(_, n)| reads(n)).sum();
        all > reads(reader) || self.body.outputs.iter().any(|o| o.value == value)
    }

    /// Allocates scratch memory for the rest of the kernel.
    pub(super) fn scratch(&mut self, bytes: usize) -> Pointer {
        let at = self.selected.entry.scratch_bytes;
        self.selected.entry.scratch_bytes += bytes.next_multiple_of(ALIGNMENT);
        Pointer::Scratch(at)
    }

    pub(super) fn launch(&mut self, launch: Launch) {
        self.selected.entry.launches.push(launch);
    }

    /// The number of launches so far.
    pub(super) fn launches(&self) -> usize {
        self.selected.entry.launches.len()
    }

    /// Removes and returns the launches from `begin` on.
    pub(super) fn take_launches(&mut self, begin: usize) -> Vec<Launch> {
        self.selected.entry.launches.split_off(begin)
    }

    /// Turns the launches from `begin` on into the fallback of a candidate that consists of a cuDNN operation and the
    /// launches before and after it; if they are a choice already, the candidate is added to it.
    pub(super) fn candidate_operation(
        &mut self,
        begin: usize,
        before: Vec<Launch>,
        operation: OperationLaunch,
        after: Vec<Launch>,
    ) {
        let name = match operation.operation.any_order {
            true => CandidateName::CudnnAnyOrder,
            false => CandidateName::Cudnn,
        };
        let operation = Launch::Operation(operation);
        let launches = before.into_iter().chain([operation]).chain(after).collect();
        let mut others = self.take_launches(begin);
        if let [Launch::Choice(candidates)] = &mut others[..] {
            candidates.insert(0, candidate(name, launches));
            self.selected.entry.launches.append(&mut others);
        } else {
            self.launch(choice((name, launches), (CandidateName::Frit, others)));
        }
    }

    pub(super) fn run(&mut self, kernel: SourceKernel) {
        self.launch(kernel.launch());
    }

    pub(super) fn copy_bytes(&mut self, to: Pointer, from: Pointer, bytes: usize) {
        if bytes > 0 {
            self.launch(Launch::Copy { from, to, bytes });
        }
    }

    /// Fills a tensor with one element.
    pub(super) fn fill(&mut self, to: Pointer, ty: &TensorType, element: f64) -> Option<()> {
        let bytes = Tensor::splat(TensorType::scalar(ty.dtype), element).to_bytes();
        if ty.bytes() == 0 {
            return Some(());
        }
        if bytes.iter().all(|b| *b == 0) {
            self.launch(Launch::Zero { at: to, bytes: ty.bytes() });
            return Some(());
        }
        let mut word = [0; 8];
        word[..bytes.len()].copy_from_slice(&bytes);
        let n = ty.shape.numel();
        self.run(
            SourceKernel::new("fill", "fill")
                .define("T", c_bytes(bytes.len())?)
                .threads(n.div_ceil(4))
                .pointer(to)
                .i64(i64::from_le_bytes(word) as usize)
                .i64(n),
        );
        Some(())
    }
}

/// A choice between a library's candidate and the fallback.
pub(super) fn choice(
    library: (CandidateName, Vec<Launch>),
    fallback: (CandidateName, Vec<Launch>),
) -> Launch {
    let candidates = [library, fallback].map(|(name, launches)| candidate(name, launches));
    Launch::Choice(candidates.into())
}

fn candidate(name: CandidateName, launches: Vec<Launch>) -> Candidate {
    Candidate { name, scratch_bytes: 0, launches }
}
