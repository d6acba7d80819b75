//! Copies the state that one rank saves to host memory, so that training continues while it is written.
//!
//! Every element is saved by exactly one rank, the lowest that holds it. No flat group is gathered.

use super::{FORMAT_VERSION, Index, Position, Progress, TensorEntry};
use crate::RunError;
use crate::device::Device;
use crate::left_out::AllLeftOut;
use crate::plan_dir::PlanDir;
use frit_ir::DType;
use frit_ir::plan::{BufferId, Group, ParamHome, ParamId, ParamSpec, Plan};
use std::collections::BTreeMap;

/// Elements of one tensor.
pub(crate) struct Piece {
    pub(crate) key: String,
    pub(crate) dtype: DType,
    /// First element of the logical tensor.
    pub(crate) begin: usize,
    pub(crate) bytes: Vec<u8>,
}

/// The buffers of a group that checkpoints save: kind, buffer and dtype.
pub(super) fn kept(group: &Group) -> impl Iterator<Item = (&str, BufferId, DType)> {
    let states = group.states.iter().filter(|s| !s.name.is_within_step());
    let states = states.map(|s| (s.name.word(), s.buffer, DType::F32));
    std::iter::once(("param", group.master, group.dtype)).chain(states)
}

/// Copies what `rank` saves.
///
/// # Errors
/// If the device failed.
pub(crate) fn take(
    plan: &Plan,
    device: &impl Device,
    rank: usize,
    trained_only: bool,
) -> Result<Vec<Piece>, RunError> {
    let is_kept = |param: ParamId| !trained_only || plan.is_of_run(param);
    let mut pieces = Vec::new();
    for group in &plan.groups {
        if rank >= group.shards() {
            continue;
        }
        for (kind, buffer, dtype) in kept(group) {
            for segment in group.segments.iter().filter(|s| is_kept(s.param)) {
                let Some((begin, from, len)) = group.owned(segment, rank) else { continue };
                let key = format!("{kind}/{}", plan.params[segment.param].name);
                let bytes = device.read(buffer, from * dtype.size(), len * dtype.size())?;
                pieces.push(Piece { key, dtype, begin, bytes });
            }
        }
    }
    if rank > 0 {
        return Ok(pieces);
    }
    for (_, param) in plan.params.iter_enumerated().filter(|(i, _)| is_kept(*i)) {
        let ParamHome::Buffer(buffer) = param.home else { continue };
        let bytes = device.read(buffer, 0, param.ty.bytes())?;
        let key = format!("param/{}", param.name);
        pieces.push(Piece { key, dtype: param.ty.dtype, begin: 0, bytes });
    }
    for state in plan.states.iter().filter(|s| !s.name.is_within_step()) {
        let bytes = device.read(state.buffer, 0, state.ty.bytes())?;
        let key = format!("state/{}", state.name);
        pieces.push(Piece { key, dtype: state.ty.dtype, begin: 0, bytes });
    }
    Ok(pieces)
}

/// The last trainable parameter with a non-finite element among these pieces.
pub(super) fn not_finite(plan: &Plan, pieces: &[Piece]) -> Option<ParamId> {
    let trained = |group: &&Group| group.trainable;
    let segments = plan.groups.iter().filter(trained).flat_map(|g| &g.segments);
    let names: BTreeMap<&str, ParamId> =
        segments.map(|s| (plan.params[s.param].name.as_str(), s.param)).collect();
    let number = |piece: &Piece| names.get(piece.key.strip_prefix("param/")?).copied();
    let broken = |piece: &&Piece| !are_finite(&piece.bytes, piece.dtype);
    pieces.iter().filter(|p| number(p).is_some()).filter(broken).filter_map(number).max()
}

/// The name of a trainable parameter with a non-finite element on any rank. All ranks must call it.
///
/// # Errors
/// If the device or another rank failed.
pub(crate) fn parameter_not_finite(
    plan: &Plan,
    device: &impl Device,
    rank: usize,
) -> Result<Option<String>, RunError> {
    let mut found = 0;
    for group in plan.groups.iter().filter(|g| g.trainable && rank < g.shards()) {
        for segment in &group.segments {
            let Some((_, from, len)) = group.owned(segment, rank) else { continue };
            let size = group.dtype.size();
            let bytes = device.read(group.master, from * size, len * size)?;
            if !are_finite(&bytes, group.dtype) {
                // Numbered from 1, so that the maximum over ranks is a parameter found by some rank.
                found = found.max(segment.param.0 as u64 + 1);
            }
        }
    }
    let found = device.largest(found)? as usize;
    let param = found.checked_sub(1).and_then(|i| plan.params.get(ParamId(i)));
    Ok(param.map(|param| param.name.clone()))
}

/// Whether floats in little-endian order are finite: not all bits of the exponent are set.
fn are_finite(bytes: &[u8], dtype: DType) -> bool {
    let half =
        |mask: u16| bytes.as_chunks::<2>().0.iter().all(|x| u16::from_le_bytes(*x) & mask != mask);
    match dtype {
        DType::F16 => half(0x7C00),
        DType::BF16 => half(0x7F80),
        _ => bytes.as_chunks::<4>().0.iter().all(|x| f32::from_le_bytes(*x).is_finite()),
    }
}

/// The index without parts: all tensors that the ranks of this plan save.
pub(super) fn index(
    dir: &PlanDir,
    step: usize,
    position: Position,
    validations: Progress,
    set: &[(String, f64)],
    left_out: &AllLeftOut,
) -> Index {
    let plan = &dir.plan;
    let is_kept = |param: &ParamSpec| !left_out.contains_key(&param.name);
    let entry =
        |dtype, shape: &[usize]| TensorEntry { dtype, shape: shape.to_vec(), parts: vec![] };
    let mut tensors = BTreeMap::new();
    for group in &plan.groups {
        for param in group.segments.iter().map(|s| &plan.params[s.param]).filter(|p| is_kept(p)) {
            for (kind, _, dtype) in kept(group) {
                let whole = entry(dtype, &param.ty.shape.0);
                tensors.insert(format!("{kind}/{}", param.name), whole);
            }
        }
    }
    let is_buffer = |p: &&ParamSpec| matches!(p.home, ParamHome::Buffer(_)) && is_kept(p);
    for param in plan.params.iter().filter(is_buffer) {
        let whole = entry(param.ty.dtype, &param.ty.shape.0);
        tensors.insert(format!("param/{}", param.name), whole);
    }
    for state in plan.states.iter().filter(|s| !s.name.is_within_step()) {
        let whole = entry(state.ty.dtype, &state.ty.shape.0);
        tensors.insert(format!("state/{}", state.name), whole);
    }
    Index {
        frit_checkpoint: FORMAT_VERSION,
        model: plan.name.clone(),
        plan_sha256: dir.hash.clone(),
        world_size: plan.world_size,
        strategy: plan.strategy,
        step,
        position,
        validations,
        set: set.iter().cloned().collect(),
        tensors,
        left_out: left_out.clone(),
    }
}
