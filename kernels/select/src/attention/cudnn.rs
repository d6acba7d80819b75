//! cuDNN candidates for attention and its gradient.
//!
//! Only without a mask, window or dropout: the library draws other numbers, its result for rows without visible keys is undocumented, and
//! its engines fail on boolean masks.

use crate::assembler::Assembler;
use crate::attention::{Setting, View};
use frit_ir::DType;
use frit_ir::plan::{Operation, OperationKind, OperationLaunch, Pointer, Strided};

/// Maximum head sizes of the engines, forward and backward.
const MOST_FORWARD: usize = 256;
const MOST_BACKWARD: usize = 128;
/// Queries and keys per tile of the gradient's engines for sm_90. Up to cuDNN 9.30 they return NaN for rows of small
/// scores beside a partial tile (pytorch issue 196678, cudnn-frontend issue 1072).
const TILE: usize = 128;
/// Elements of 2 bytes per vector access.
const AT_ONCE: usize = 8;

/// A view with the sizes of its four axes.
type Tensor = (View, [usize; 4]);

impl Setting<'_> {
    /// Adds a cuDNN candidate beside the launches from `begin` on, if cuDNN may have an engine.
    pub(super) fn candidate(&self, a: &mut Assembler<'_>, y: View, lse: Pointer, begin: usize) {
        let rows = Strided::dense(DType::F32, &[self.dims.b, self.dims.h, self.dims.t, 1]);
        let [q, k, v] = self.operands();
        let y = (y, self.of_queries(self.dims.e));
        let kind =
            OperationKind::Attention { scale_bits: self.scale_bits(), causal: self.sight.causal };
        if self.is_known(&[q, k, v, y], MOST_FORWARD) {
            self.launch(a, (kind, false), &[q, k, v, y], &[(lse, rows)], begin);
        }
    }

    /// The same for the gradient; `delta` is scratch memory for one number per row. Where the order of additions does not
    /// matter, an operation that adds up the gradients of queries in memory is a candidate as well: it needs no workspace for
    /// the gradients of scores.
    pub(super) fn gradient_candidate(
        &self,
        a: &mut Assembler<'_>,
        [dy, y]: [View; 2],
        [lse, delta]: [Pointer; 2],
        [dq, dk, dv]: [View; 3],
        begin: usize,
    ) {
        let d = &self.dims;
        let rows = Strided::dense(DType::F32, &[d.b, d.h, d.t, 1]);
        let [q, k, v] = self.operands();
        let values = self.of_queries(d.e);
        let views = [q, k, v, (y, values), (dy, values), (dq, q.1), (dk, k.1), (dv, v.1)];
        let kind = OperationKind::AttentionGrad {
            scale_bits: self.scale_bits(),
            causal: self.sight.causal,
        };
        let whole = d.t.is_multiple_of(TILE) && d.s.is_multiple_of(TILE);
        if !whole || !self.is_known(&views, MOST_BACKWARD) {
            return;
        }
        let statistics = [(lse, rows.clone()), (delta, rows)];
        if !a.deterministic {
            let sums = Strided::dense(DType::F32, &[d.b, d.h, d.t, d.d]);
            let beside = [&statistics[..], &[(a.scratch(sums.bytes()), sums)]].concat();
            self.launch(a, (kind.clone(), true), &views, &beside, begin);
        }
        self.launch(a, (kind, false), &views, &statistics, begin);
    }

    fn launch(
        &self,
        a: &mut Assembler<'_>,
        (kind, any_order): (OperationKind, bool),
        views: &[Tensor],
        rows: &[(Pointer, Strided)],
        begin: usize,
    ) {
        let strided = |(view, sizes): &Tensor| {
            let [batch, head, row] = view.strides;
            Strided { strides: vec![batch, head, row, 1], ..Strided::dense(self.element, sizes) }
        };
        let tensors =
            views.iter().map(strided).chain(rows.iter().map(|(_, r)| r.clone())).collect();
        let at = views.iter().map(|(v, _)| v.at).chain(rows.iter().map(|(at, _)| *at)).collect();
        let operation = Operation { kind, tensors, any_order };
        let (before, after) = (vec![], vec![]);
        a.candidate_operation(begin, before, OperationLaunch { operation, at }, after);
    }

    /// Queries, keys and values with their sizes.
    fn operands(&self) -> [Tensor; 3] {
        let d = &self.dims;
        let of_keys = |size| [d.b, d.g, d.s, size];
        [(self.q, self.of_queries(d.d)), (self.k, of_keys(d.d)), (self.v, of_keys(d.e))]
    }

    fn of_queries(&self, size: usize) -> [usize; 4] {
        [self.dims.b, self.dims.h, self.dims.t, size]
    }

    /// The bits of the scale as an f32, which the engines require.
    fn scale_bits(&self) -> u32 {
        (self.scale as f32).to_bits()
    }

    /// Whether engines may support it: every row of every tensor begins at a multiple of 16 bytes.
    fn is_known(&self, views: &[Tensor], most: usize) -> bool {
        let whole = |(view, sizes): &Tensor| {
            let bytes = AT_ONCE * self.element.size();
            sizes.iter().all(|n| *n > 0)
                && sizes[3].is_multiple_of(AT_ONCE)
                && sizes[3] <= most
                && view.strides.iter().all(|n| n.is_multiple_of(AT_ONCE))
                && view.at.offset_bytes().is_multiple_of(bytes)
        };
        let is_plain = self.mask.is_none() && self.dropout.is_none() && self.sight.window.is_none();
        is_plain && self.element.is_low_precision() && views.iter().all(whole)
    }
}
