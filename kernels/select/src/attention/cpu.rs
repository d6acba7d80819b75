//! Selection for attention on the CPU; layout operations of the body become strides of the operands.

use super::dropout::drawn;
use crate::routine::{Access, Call, elem};
use frit_ir::ops::attention::{COARSE, Dims, FILLED, Sight};
use frit_ir::strided::{self, Strided};
use frit_ir::{DType, Graph, Op, Shape, TensorType, ValueId};
use frit_kernels::routine::Routine;
use frit_kernels::routine::attention as cpu;
use frit_kernels::routine::random::RandomMask;

const _: () = assert!(cpu::COARSE as f64 == COARSE && cpu::FILLED as f64 == FILLED);

/// The routine of a body of one attention, or its gradient, and layout operations that strides express.
pub(crate) fn cpu(body: &Graph) -> Option<Call> {
    let mut attentions = body
        .nodes()
        .map(|(_, n)| n)
        .filter(|n| matches!(n.op, Op::Attention(_) | Op::AttentionGrad(_)));
    let (Some(node), None) = (attentions.next(), attentions.next()) else { return None };
    // A mask that is drawn inside stands for the generator's state.
    let mut operands = node.inputs.clone();
    let (masks, keep) = match &node.op {
        Op::Attention(op) => (op.masks(&node.inputs), op.keep),
        Op::AttentionGrad(op) => (op.masks(&node.inputs), op.keep),
        _ => return None,
    };
    let drawn = masks[1].and_then(|kept| drawn(body, *kept));
    if let (Some((_, state)), Some(last)) = (drawn, operands.last_mut()) {
        *last = state;
    }
    let drawn =
        drawn.map(|(mask, _)| RandomMask { len: mask.shape.numel(), keep: mask.keep, id: mask.id });
    let dropout = keep.map(|keep| cpu::Dropout { factor: keep.recip() as f32, drawn });
    let reads: Vec<Strided> =
        operands.iter().map(|v| strided::read(body, *v)).collect::<Option<_>>()?;
    let writes: Vec<Strided> =
        node.outputs.iter().map(|v| strided::written(body, *v)).collect::<Option<_>>()?;
    let types = |values: &[ValueId]| -> Vec<TensorType> {
        values.iter().map(|v| body.ty(*v).clone()).collect()
    };
    let (ins, outs) = (types(&operands), types(&node.outputs));
    let dense = |v: &Strided, t: &TensorType| v.is_dense(t.shape.dims()).then_some(());
    if masks[1].is_some() {
        dense(reads.last()?, ins.last()?)?;
    }
    let mask_at = |first: usize| masks[0].is_some().then(|| (&reads[first], &ins[first]));
    let (attention, gradients) = match &node.op {
        Op::Attention(op) => {
            dense(&writes[1], &outs[1])?;
            let layouts = [&reads[0], &reads[1], &reads[2], &writes[0]];
            let attention = cpu_attention(op.scale, op.sight(), &ins[..3], layouts, mask_at(3))?;
            (attention, None)
        }
        Op::AttentionGrad(op) => {
            dense(&reads[5], &ins[5])?;
            if let Some((view, ty)) = writes.get(3).zip(outs.get(3)) {
                dense(view, ty)?;
            }
            let layouts = [&reads[1], &reads[2], &reads[3], &reads[4]];
            let attention = cpu_attention(op.scale, op.sight(), &ins[1..4], layouts, mask_at(6))?;
            let gradients = cpu::GradientStrides {
                d_o: cpu_strides(&reads[0])?,
                d_q: cpu_strides(&writes[0])?,
                d_k: cpu_strides(&writes[1])?,
                d_v: cpu_strides(&writes[2])?,
            };
            (attention, Some(gradients))
        }
        _ => return None,
    };
    let attention = cpu::Attention { dropout, ..attention };
    let routine = match gradients {
        None => Routine::Attention(attention),
        Some(gradients) => Routine::AttentionGrad(attention, gradients),
    };
    let accesses = |values: &[ValueId], views: Vec<Strided>| -> Vec<Access> {
        values.iter().zip(views).map(|(value, view)| Access::View(*value, view)).collect()
    };
    let (reads, writes) = (accesses(&operands, reads), accesses(&node.outputs, writes));
    Some(Call { routine, reads, writes })
}

/// The layout of `[batch, heads, time, dim]`, if the elements of a head at one time are contiguous.
fn cpu_strides(view: &Strided) -> Option<cpu::Strides> {
    let [batch, head, time, 1] = view.strides[..] else { return None };
    Some(cpu::Strides { batch: batch as isize, head: head as isize, time: time as isize })
}

fn cpu_attention(
    scale: f64,
    sight: Sight,
    qkv: &[TensorType],
    [q, k, v, o]: [&Strided; 4],
    mask: Option<(&Strided, &TensorType)>,
) -> Option<cpu::Attention> {
    let d = Dims::of(&qkv[0], &qkv[1], &qkv[2]).ok()?;
    let mask = match mask {
        None => None,
        Some((view, ty)) => {
            let kind = match ty.dtype {
                DType::Bool => cpu::MaskKind::Keep,
                dtype => cpu::MaskKind::Additive(elem(dtype)?),
            };
            let full = Shape::from([d.b, d.h, d.t, d.s]);
            let strides = ty.shape.broadcast_strides(&full)?;
            if !view.is_dense(ty.shape.dims()) {
                return None;
            }
            Some(cpu::Mask {
                kind,
                batch: strides[0] as isize,
                head: strides[1] as isize,
                query: strides[2] as isize,
                key: strides[3] as isize,
            })
        }
    };
    Some(cpu::Attention {
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
        q: cpu_strides(q)?,
        k: cpu_strides(k)?,
        v: cpu_strides(v)?,
        o: cpu_strides(o)?,
        mask,
        dropout: None,
    })
}
