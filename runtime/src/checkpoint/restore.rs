//! Loads a checkpoint into one rank of a plan, for any ranks and strategy that wrote it.
//!
//! A rank copies the ranges it owns, part by part, from the memory map directly to their destination; no tensor is
//! materialized unless the rank holds all of it. Parameters and optimizer state are required; the loss scaler's state is
//! loaded only if both plans scale dynamically. Without a history of fp8 maxima one begins, and without averages of the parameters
//! these begin as the parameters.

use super::Checkpoint;
use super::snapshot::kept;
use crate::RunError;
use crate::convert::{self, converted};
use crate::device::Device;
use crate::first_values::{self, Origin};
use frit_ir::TensorType;
use frit_ir::ops::StateName;
use frit_ir::ops::random::first_state;
use frit_ir::plan::{BufferId, ParamHome, Plan};

/// Scalars that only a dynamic loss scaler changes.
const SCALER: [StateName; 2] = [StateName::LossScale, StateName::GrowthTracker];

/// Writes what `rank` owns to its device, for a run that continues with batch `first_batch` of the data. Omitted
/// parameters are left unchanged.
///
/// # Errors
/// If the checkpoint was written for another model or optimizer, or is damaged.
pub(crate) fn restore(
    checkpoint: &Checkpoint,
    plan: &Plan,
    device: &mut impl Device,
    rank: usize,
    first_batch: usize,
) -> Result<(), RunError> {
    for group in &plan.groups {
        for segment in &group.segments {
            let Some((begin, to, len)) = group.owned(segment, rank) else { continue };
            let param = &plan.params[segment.param];
            let is_there = |kind: &str| {
                kind != "param" || !checkpoint.index.left_out.contains_key(&param.name)
            };
            for (kind, buffer, dtype) in kept(group).filter(|(kind, ..)| is_there(kind)) {
                let mut key = format!("{kind}/{}", param.name);
                if kind == StateName::Ema.to_string() && checkpoint.entry(&key).is_none() {
                    key = format!("param/{}", param.name);
                }
                let stored = checkpoint.entry(&key).map_or(dtype, |e| e.dtype);
                // The stored dtype of a frozen parameter may differ between the plans.
                let is_param = kind == "param" && converted(&[], stored, dtype).is_some();
                let expected = if is_param { stored } else { dtype };
                expect(checkpoint, &key, &param.ty.with_dtype(expected))?;
                let written: Vec<_> = match kind {
                    "param" => convert::held(group).collect(),
                    _ => vec![(buffer, dtype)],
                };
                checkpoint.read(&key, begin, len, |first, bytes| {
                    if kind == "param" {
                        let origin = Origin::Checkpoint(&checkpoint.path);
                        first_values::check(plan, segment.param, (bytes, stored, first), origin)?;
                    }
                    written.iter().try_for_each(|&buffer| {
                        convert::write(device, buffer, to + first - begin, bytes, stored)
                    })
                })?;
            }
        }
    }
    for param in &plan.params {
        let ParamHome::Buffer(buffer) = param.home else { continue };
        if checkpoint.index.left_out.contains_key(&param.name) {
            continue;
        }
        whole(checkpoint, &format!("param/{}", param.name), &param.ty, buffer, device)?;
    }
    let tracker = format!("state/{}", StateName::GrowthTracker);
    let both = checkpoint.entry(&tracker).is_some()
        && plan.states.iter().any(|s| s.name == StateName::GrowthTracker);
    for state in plan.states.iter().filter(|s| !s.name.is_within_step()) {
        if SCALER.contains(&state.name) && !both {
            continue;
        }
        let key = format!("state/{}", state.name);
        if state.name == StateName::AmaxHistory && checkpoint.entry(&key).is_none() {
            continue;
        }
        if state.name == StateName::Rng {
            if checkpoint.entry(&key).is_none() {
                continue;
            }
            expect(checkpoint, &key, &state.ty)?;
            let stored = checkpoint.tensor(&key)?;
            device.write(state.buffer, 0, &generator(&stored, plan, rank, first_batch))?;
            continue;
        }
        whole(checkpoint, &key, &state.ty, state.buffer, device)?;
    }
    checkpoint.release();
    Ok(())
}

/// The state of the random generator: the seed of all ranks, this rank's position, and the count, which is that of the
/// batch if this plan counts micro-steps differently.
fn generator(stored: &[u8], plan: &Plan, rank: usize, first_batch: usize) -> Vec<u8> {
    let (words, _) = stored.as_chunks::<8>();
    let [seed, count] = [words[0], words[2]].map(i64::from_le_bytes);
    let mut state = first_state(seed as u64, rank, plan.world_size, plan.accumulation);
    let same = [3, 4].iter().all(|i| words[*i] == state[*i].to_le_bytes());
    state[2] = if same { count } else { (first_batch * plan.accumulation) as i64 };
    state.iter().flat_map(|x| x.to_le_bytes()).collect()
}

fn whole(
    checkpoint: &Checkpoint,
    key: &str,
    ty: &TensorType,
    buffer: BufferId,
    device: &mut impl Device,
) -> Result<(), RunError> {
    expect(checkpoint, key, ty)?;
    checkpoint.read(key, 0, ty.shape.numel(), |first, bytes| {
        device.write(buffer, first * ty.dtype.size(), bytes)
    })
}

/// Checks that the checkpoint contains this tensor.
fn expect(checkpoint: &Checkpoint, key: &str, ty: &TensorType) -> Result<(), RunError> {
    let refuse = |reason: String| Err(RunError::checkpoint(&checkpoint.path, reason));
    let Some(entry) = checkpoint.entry(key) else {
        return refuse(format!(
            "holds no `{key}`; it was written for another model (its model is `{}`), with another optimizer, or with other \
             parameters trained",
            checkpoint.index.model
        ));
    };
    if entry.dtype != ty.dtype || entry.shape != ty.shape.0 {
        let found = TensorType::new(entry.dtype, entry.shape.clone());
        return refuse(format!("holds `{key}` as {found}, the plan expects {ty}"));
    }
    Ok(())
}
