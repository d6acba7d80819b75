//! Attention and its gradient, reading and writing through the layout operations of their body.

use super::operand::{Operand, elem};
use frit_ir::ops::attention::{Dims, Sight};
use frit_ir::strided::{self, Strided};
use frit_ir::{DType, Graph, Op, Shape, TensorType, ValueId};
use frit_kernels::attention::{
    Attention, BackwardInputs, BackwardOutputs, GradientStrides, Mask, MaskKind, Strides,
};
use frit_kernels::pool::Pool;

/// A prepared attention.
pub(super) struct AttentionRoutine {
    attention: Attention,
    /// The layout of the gradients; `None` for the forward pass.
    gradients: Option<GradientStrides>,
    /// Operands and results of the node, in its order.
    reads: Vec<At>,
    writes: Vec<At>,
}

/// A place in an operand, or result, of the body.
#[derive(Clone, Copy)]
struct At {
    operand: usize,
    bytes: usize,
}

impl AttentionRoutine {
    /// The routine of a body that holds one attention, or gradient, and layout operations that strides
    /// stand for.
    pub(super) fn of(body: &Graph) -> Option<Self> {
        let mut attentions = body
            .nodes()
            .map(|(_, n)| n)
            .filter(|n| matches!(n.op, Op::Attention(_) | Op::AttentionGrad(_)));
        let (Some(node), None) = (attentions.next(), attentions.next()) else { return None };
        let reads: Vec<Strided> =
            node.inputs.iter().map(|v| strided::read(body, *v)).collect::<Option<_>>()?;
        let writes = strided::results(body, node)?;
        let types = |values: &[ValueId]| -> Vec<TensorType> {
            values.iter().map(|v| body.ty(*v).clone()).collect()
        };
        let (ins, outs) = (types(&node.inputs), types(&node.outputs));
        let places = |views: &[Strided], types: &[TensorType]| -> Vec<At> {
            let at = |(v, t): (&Strided, &TensorType)| At {
                operand: v.operand,
                bytes: v.offset * t.dtype.size(),
            };
            views.iter().zip(types).map(at).collect()
        };
        let dense = |v: &Strided, t: &TensorType| v.is_dense(t.shape.dims()).then_some(());
        let (attention, gradients) = match &node.op {
            Op::Attention(op) => {
                dense(&writes[1], &outs[1])?;
                let layouts = [&reads[0], &reads[1], &reads[2], &writes[0]];
                let mask = reads.get(3).zip(ins.get(3));
                (prepare(op.scale, op.sight(), &ins[..3], layouts, mask)?, None)
            }
            Op::AttentionGrad(op) => {
                dense(&reads[5], &ins[5])?;
                if let Some((view, ty)) = writes.get(3).zip(outs.get(3)) {
                    dense(view, ty)?;
                }
                let layouts = [&reads[1], &reads[2], &reads[3], &reads[4]];
                let mask = reads.get(6).zip(ins.get(6));
                let gradients = GradientStrides {
                    d_o: strides(&reads[0])?,
                    d_q: strides(&writes[0])?,
                    d_k: strides(&writes[1])?,
                    d_v: strides(&writes[2])?,
                };
                (prepare(op.scale, op.sight(), &ins[1..4], layouts, mask)?, Some(gradients))
            }
            _ => return None,
        };
        Some(AttentionRoutine {
            attention,
            gradients,
            reads: places(&reads, &ins),
            writes: places(&writes, &outs),
        })
    }

    /// Runs it.
    ///
    /// # Safety
    /// The operands are dense and of the body's types; results overlap no operand.
    pub(super) unsafe fn run(&self, pool: &Pool, reads: &[Operand], writes: &[Operand]) {
        // SAFETY: the body's views lie inside its operands and results.
        let read = |i: usize| unsafe {
            reads[self.reads[i].operand].pointer.add(self.reads[i].bytes).cast_const()
        };
        // SAFETY: as above.
        let write =
            |i: usize| unsafe { writes[self.writes[i].operand].pointer.add(self.writes[i].bytes) };
        let mask = |i: usize| if i < self.reads.len() { read(i) } else { std::ptr::null() };
        let Some(gradients) = &self.gradients else {
            // SAFETY: the caller's promise.
            return unsafe {
                self.attention.forward(
                    pool,
                    read(0),
                    read(1),
                    read(2),
                    mask(3),
                    write(0),
                    write(1).cast(),
                );
            };
        };
        let inputs = BackwardInputs {
            d_o: read(0),
            q: read(1),
            k: read(2),
            v: read(3),
            o: read(4),
            lse: read(5).cast(),
            mask: mask(6),
        };
        let outputs = BackwardOutputs {
            d_q: write(0),
            d_k: write(1),
            d_v: write(2),
            d_mask: if self.writes.len() > 3 { write(3).cast() } else { std::ptr::null_mut() },
        };
        // SAFETY: the caller's promise.
        unsafe { self.attention.backward(pool, gradients, &inputs, &outputs) };
    }
}

/// The layout of `[batch, heads, time, dim]`, if the elements of a head at one time are contiguous.
fn strides(view: &Strided) -> Option<Strides> {
    let [batch, head, time, 1] = view.strides[..] else { return None };
    Some(Strides { batch: batch as isize, head: head as isize, time: time as isize })
}

fn prepare(
    scale: f64,
    sight: Sight,
    qkv: &[TensorType],
    [q, k, v, o]: [&Strided; 4],
    mask: Option<(&Strided, &TensorType)>,
) -> Option<Attention> {
    let d = Dims::of(&qkv[0], &qkv[1], &qkv[2]).ok()?;
    let mask = match mask {
        None => None,
        Some((view, ty)) => {
            let kind = match ty.dtype {
                DType::Bool => MaskKind::Keep,
                dtype => MaskKind::Additive(elem(dtype)?),
            };
            let full = Shape::from([d.b, d.h, d.t, d.s]);
            let strides = ty.shape.broadcast_strides(&full)?;
            if !view.is_dense(ty.shape.dims()) {
                return None;
            }
            Some(Mask {
                kind,
                batch: strides[0] as isize,
                head: strides[1] as isize,
                query: strides[2] as isize,
                key: strides[3] as isize,
            })
        }
    };
    Some(Attention {
        batch: d.b,
        heads: d.h,
        kv_heads: d.g,
        q_len: d.t,
        kv_len: d.s,
        head_dim: d.d,
        value_dim: d.e,
        scale: scale as f32,
        causal: sight.causal,
        window: sight.window,
        elem: elem(qkv[0].dtype)?,
        q: strides(q)?,
        k: strides(k)?,
        v: strides(v)?,
        o: strides(o)?,
        mask,
    })
}
