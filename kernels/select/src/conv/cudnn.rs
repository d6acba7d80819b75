//! cuDNN candidates for convolution and its gradients.
//!
//! Of images that lie channels last, channels that are no whole vectors, such as those of colors, are padded with zeros in scratch
//! memory: engines for tensor cores ask for 16 bytes.

use crate::assembler::Assembler;
use crate::conv::Conv;
use frit_ir::plan::{
    Direction, Launch, Operation, OperationKind, OperationLaunch, Pointer, Strided,
};
use frit_ir::{DType, Op};

/// Elements of 2 bytes that engines read at once.
pub(super) const VECTOR: usize = 8;

impl Conv<'_> {
    /// Adds a cuDNN candidate beside the launches from `begin` on, if cuDNN may support the types. With `is_last`, operands and
    /// result lie channels last.
    pub(super) fn candidate(
        &self,
        a: &mut Assembler<'_>,
        op: &Op,
        [first, second]: [Pointer; 2],
        to: Pointer,
        begin: usize,
        is_last: bool,
    ) -> Option<()> {
        let (direction, at) = match op {
            Op::Conv(_) => (Direction::Forward, [first, second, to]),
            Op::ConvGradInput(_) => (Direction::GradInput, [to, second, first]),
            _ => (Direction::GradWeight, [second, to, first]),
        };
        let low = matches!(self.element, DType::F16 | DType::BF16);
        let padded = |n: usize| n.next_multiple_of(VECTOR);
        let sizes = (padded(self.channels), padded(self.filters));
        if is_last && low && self.groups == 1 && sizes != (self.channels, self.filters) {
            let padded = Conv { channels: sizes.0, filters: sizes.1, ..*self };
            return padded.padded_candidate(a, direction, at, begin, self);
        }
        // Engines that accumulate 2-byte elements into an f32 result require channels last, in multiples of 16 bytes.
        let widens = low && self.out == DType::F32;
        let whole = |n: usize| (n / self.groups).is_multiple_of(VECTOR);
        let known = match self.out == self.element {
            true => low || matches!(self.element, DType::F32 | DType::F64),
            false => widens && whole(self.channels) && whole(self.filters),
        };
        if !known {
            return Some(());
        }
        let any_order = !a.deterministic;
        let operation = Operation { any_order, ..self.operation(direction, widens || is_last) };
        let result = operation.results()[0];
        let (mut places, mut after) = (at, Vec::new());
        let first_before = a.launches();
        if widens && !is_last {
            for (i, tensor) in operation.tensors.iter().enumerate() {
                let dense = Strided::dense(tensor.dtype, &tensor.sizes);
                if tensor.lies_as(&dense) {
                    continue;
                }
                places[i] = a.scratch(tensor.bytes());
                let (strides, size) = (tensor.strides.clone(), tensor.dtype.size());
                let begin = a.launches();
                if i == result {
                    let ends = (at[i], places[i]);
                    a.copy(ends, &tensor.sizes, [dense.strides, strides], size)?;
                    after = a.take_launches(begin);
                } else {
                    let ends = (places[i], at[i]);
                    a.copy(ends, &tensor.sizes, [strides, dense.strides], size)?;
                }
            }
        }
        let before = a.take_launches(first_before);
        let at = places.to_vec();
        a.candidate_operation(begin, before, OperationLaunch { operation, at }, after);
        Some(())
    }

    /// Adds the candidate for a convolution of which this one has more channels or filters, on padded copies of what lies
    /// channels last.
    fn padded_candidate(
        &self,
        a: &mut Assembler<'_>,
        direction: Direction,
        at: [Pointer; 3],
        begin: usize,
        of: &Conv<'_>,
    ) -> Option<()> {
        if ![self.element, DType::F32].contains(&self.out) {
            return Some(());
        }
        let operation =
            Operation { any_order: !a.deterministic, ..self.operation(direction, true) };
        let own = of.operation(direction, true);
        let result = operation.results()[0];
        let (mut places, mut after) = (at, Vec::new());
        let first_before = a.launches();
        for (i, (padded, own)) in operation.tensors.iter().zip(&own.tensors).enumerate() {
            if padded == own {
                continue;
            }
            places[i] = a.scratch(padded.bytes());
            let size = own.dtype.size();
            // Neighbors in memory, which threads copy together, come last.
            let in_memory = |list: &[usize]| -> Vec<usize> {
                [0].into_iter().chain(2..list.len()).chain([1]).map(|axis| list[axis]).collect()
            };
            let sizes = in_memory(&own.sizes);
            let strides = |t: &Strided| in_memory(&t.strides);
            if i == result {
                let begin = a.launches();
                let ends = (at[i], places[i]);
                a.copy(ends, &sizes, [strides(own), strides(padded)], size)?;
                after = a.take_launches(begin);
            } else {
                a.launch(Launch::Zero { at: places[i], bytes: padded.bytes() });
                let ends = (places[i], at[i]);
                a.copy(ends, &sizes, [strides(padded), strides(own)], size)?;
            }
        }
        let before = a.take_launches(first_before);
        let at = places.to_vec();
        a.candidate_operation(begin, before, OperationLaunch { operation, at }, after);
        Some(())
    }

    /// The operation on dense tensors, or on tensors with channels last. One spatial axis becomes a plane of one row:
    /// the library supports two or three.
    fn operation(&self, direction: Direction, channels_last: bool) -> Operation {
        let line = self.size.len() == 1;
        let axes = |unit: usize, list: &[usize]| match line {
            true => vec![unit, list[0]],
            false => list.to_vec(),
        };
        let window = self.window;
        let positions = window.positions(self.size, self.taps).unwrap_or_default();
        let tensor = |dtype, outer: [usize; 2], inner: &[usize]| {
            let sizes = [&outer[..], &axes(1, inner)[..]].concat();
            match channels_last {
                true => Strided::channels_last(dtype, &sizes),
                false => Strided::dense(dtype, &sizes),
            }
        };
        let dtype = |result| if direction == result { self.out } else { self.element };
        let image = tensor(dtype(Direction::GradInput), [self.images, self.channels], self.size);
        let filters = [self.filters, self.channels / self.groups];
        let filters = tensor(dtype(Direction::GradWeight), filters, self.taps);
        let response = [self.images, self.filters];
        let response = tensor(dtype(Direction::Forward), response, &positions);
        Operation {
            kind: OperationKind::Conv {
                direction,
                strides: axes(1, &window.strides),
                dilations: axes(1, &window.dilations),
                low: axes(0, &window.low),
                high: axes(0, &window.high),
            },
            tensors: vec![image, filters, response],
            any_order: false,
        }
    }
}
