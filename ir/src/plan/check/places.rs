//! Byte ranges: buffers within arenas, places within buffers.

use super::{CheckError, Result, ensure, name, short};
use crate::TensorType;
use crate::plan::{ALIGNMENT, Arena, Buffer, Place, Plan};

/// Maximum bytes of an arena, and of all buffers in total.
const MAX_ARENA: usize = 1 << 50;
const MAX_BYTES: usize = 1 << 60;

/// The part of a plan that exceeds the maximum: an arena, or all buffers; `None` if nothing does.
pub fn too_large(plan: &Plan) -> Option<String> {
    let large = |arena: &&Arena| plan.arena_bytes(**arena) > MAX_ARENA;
    if let Some(arena) = Arena::ALL.iter().find(large) {
        return Some(format!("the {} arena is too large", arena.name()));
    }
    let sum = plan.buffers.iter().fold(0_usize, |sum, b| sum.saturating_add(b.bytes));
    (sum > MAX_BYTES).then(|| "the buffers are too large".into())
}

/// Every buffer is within its arena and aligned, and those that live as long as the run have bytes of their own.
pub(super) fn check(plan: &Plan) -> Result {
    let too_large = too_large(plan);
    ensure(too_large.is_none(), || too_large.unwrap_or_default())?;
    ensure(plan.workspace_lower_bound <= plan.workspace_bytes, || {
        "the workspace is smaller than its lower bound".into()
    })?;
    for b in &plan.buffers {
        name(&b.name)?;
        let end = b.offset.checked_add(b.bytes);
        ensure(end.is_some_and(|end| end <= plan.arena_bytes(b.arena)), || {
            format!("buffer `{}` exceeds its arena", short(&b.name))
        })?;
        ensure(b.offset.is_multiple_of(ALIGNMENT), || {
            format!("buffer `{}` is not aligned", short(&b.name))
        })?;
    }
    let mut kept: Vec<&Buffer> =
        plan.buffers.iter().filter(|b| b.arena.outlives_step() && b.bytes > 0).collect();
    kept.sort_by_key(|b| (b.arena as usize, b.offset));
    kept.windows(2).try_for_each(|pair| {
        let apart =
            pair[0].arena != pair[1].arena || pair[0].offset + pair[0].bytes <= pair[1].offset;
        ensure(apart, || {
            let (a, b) = (short(&pair[0].name), short(&pair[1].name));
            format!("buffers `{a}` and `{b}`, which outlive the step, share bytes")
        })
    })
}

/// The place is within its buffer and aligned for its elements.
pub(super) fn place(plan: &Plan, place: &Place) -> Result {
    let buffer = plan.buffers.get(place.buffer);
    let buffer = buffer.ok_or_else(|| CheckError(format!("no buffer {}", place.buffer)))?;
    ty(&place.ty)?;
    let end = place.offset.checked_add(place.ty.bytes());
    ensure(end.is_some_and(|end| end <= buffer.bytes), || {
        format!("{} at byte {} exceeds buffer `{}`", place.ty, place.offset, short(&buffer.name))
    })?;
    ensure(place.offset.is_multiple_of(place.ty.dtype.size()), || {
        let name = short(&buffer.name);
        format!("{} at byte {} of `{name}` is not aligned", place.ty, place.offset)
    })
}

/// Sizes can be computed of the type without overflow.
pub(super) fn ty(ty: &TensorType) -> Result {
    ensure(ty.shape.checked_numel().is_some(), || {
        format!("a tensor of {} axes is too large", ty.shape.rank())
    })
}
