//! Dense tensors as pieces of values, one behind the other.

use frit_ir::plan::{GroupId, Segment};
use frit_ir::{DType, ValueId};

/// What the elements of a piece are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum What {
    /// Consecutive elements of a value, from this one on.
    Of(ValueId, usize),
    /// Zeros.
    Zero,
    /// Not known.
    Unknown,
}

/// Consecutive elements of a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Piece {
    /// The first of them in the tensor.
    pub(super) begin: usize,
    /// How many there are.
    pub(super) numel: usize,
    /// What they are.
    pub(super) what: What,
}

impl Piece {
    /// The elements `begin..end` of the tensor, which are among these.
    pub(super) fn part(self, begin: usize, end: usize) -> Piece {
        let what = match self.what {
            What::Of(value, from) => What::Of(value, from + begin - self.begin),
            other => other,
        };
        Piece { begin, numel: end - begin, what }
    }
}

/// Whether a piece lies within one of these parameters.
pub(super) fn is_of_one(piece: &Piece, segments: &[Segment]) -> bool {
    let end = piece.begin + piece.numel;
    segments.iter().any(|s| s.offset <= piece.begin && end <= s.offset + s.numel)
}

/// A tensor of consecutive pieces that are not empty.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Flat {
    pub(super) dtype: DType,
    /// Elements in total.
    pub(super) numel: usize,
    /// Of how many ranks each has an equal part of it; 1 if all have the whole.
    pub(super) shards: usize,
    /// The pieces.
    pub(super) pieces: Vec<Piece>,
    /// The group of which it has the gradients, if it is read from where those are.
    pub(super) gradients: Option<GroupId>,
    /// Whether ranks have a part because each kept one of what all had; a graph has no word for that.
    pub(super) resharded: bool,
}

impl Flat {
    /// Its only piece, if it is all of a value of so many elements.
    pub(super) fn value(&self, numel: impl Fn(ValueId) -> usize) -> Option<ValueId> {
        match self.pieces[..] {
            [Piece { what: What::Of(value, 0), .. }] if numel(value) == self.numel => Some(value),
            _ => None,
        }
    }

    /// The elements at which its pieces begin.
    pub(super) fn begins(&self) -> impl Iterator<Item = usize> {
        self.pieces.iter().map(|piece| piece.begin)
    }

    /// Its elements from each of these on to the next: the piece that has them, if one has all.
    pub(super) fn cut_at(&self, begins: &[usize]) -> Vec<Option<Piece>> {
        let mut own = self.pieces.iter().peekable();
        let ends = begins.iter().skip(1).copied().chain([self.numel]);
        let cut = |(begin, end): (usize, usize)| {
            while own.next_if(|piece| piece.begin + piece.numel <= begin).is_some() {}
            let piece = own.peek().filter(|piece| end <= piece.begin + piece.numel)?;
            Some(piece.part(begin, end))
        };
        begins.iter().copied().zip(ends).map(cut).collect()
    }
}

/// A table of a flat group, relative to the part of a rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Table {
    /// Where its parameter groups begin, but for the first.
    ParamGroups(GroupId),
    /// Where its parameters begin.
    Params(GroupId),
}
