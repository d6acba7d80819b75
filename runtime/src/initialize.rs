//! Writes the initial values of all persistent buffers of a device.

use crate::RunError;
use crate::convert;
use crate::device::Device;
use crate::first_values::{self, Origin};
use crate::plan_dir::PlanDir;
use crate::save::Tensors;
use frit_ir::DType;
use frit_ir::ops::StateName;
use frit_ir::ops::random::first_state;
use frit_ir::plan::ParamHome;
use std::borrow::Cow;

/// Writes the initial values of everything persistent; the arenas must be zero. `replaced` are parameters used instead
/// of the plan's, `changes` hyper-parameters.
///
/// # Errors
/// If the device failed, or an initial value is not finite.
pub(crate) fn initialize(
    dir: &PlanDir,
    changes: &[(String, f64)],
    replaced: &Tensors,
    device: &mut impl Device,
    rank: usize,
) -> Result<(), RunError> {
    let plan = &dir.plan;
    let weight = |name: &str| match replaced.get(name) {
        Some(bytes) => Ok(Some(Cow::Borrowed(bytes.as_slice()))),
        None => dir.weight(name),
    };
    // Until the first step the average equals the parameter.
    write_params(dir, weight, true, device, rank)?;
    for group in &plan.groups {
        let groups =
            group.param_group_offsets.map(|buffer| (buffer, group.param_group_offsets_of(rank)));
        let params = group.param_offsets.map(|buffer| (buffer, group.param_offsets_of(rank)));
        for (buffer, table) in groups.into_iter().chain(params) {
            let bytes: Vec<u8> = table.iter().flat_map(|x| x.to_le_bytes()).collect();
            device.write(buffer, 0, &bytes)?;
        }
        for state in group.states.iter().filter(|s| s.init != 0.0) {
            let value = (state.init as f32).to_le_bytes();
            device.write(state.buffer, 0, &value.repeat(group.shard_numel))?;
        }
    }
    for constant in &plan.constants {
        if let Some(bytes) = weight(&constant.name)? {
            device.write(constant.buffer, 0, &bytes)?;
        }
    }
    for state in &plan.states {
        let value = if state.name == StateName::Rng {
            let start = first_state(plan.seed, rank, plan.world_size, plan.accumulation);
            frit_ir::Tensor::ints(state.ty.dtype, state.ty.shape.clone(), start.to_vec())
        } else {
            frit_ir::Tensor::splat(state.ty.clone(), state.init)
        };
        device.write(state.buffer, 0, &value.to_bytes())?;
    }
    for hyper in &plan.hyper {
        let changed = changes.iter().find(|(name, _)| *name == hyper.name);
        let value = changed.map_or(hyper.value, |(_, value)| *value) as f32;
        device.write(hyper.buffer, 0, &value.to_le_bytes())?;
    }
    dir.release();
    Ok(())
}

/// Writes what `rank` owns of the parameters that have a weight, as whole tensors in the type of files; with `averages`
/// their moving averages, too.
///
/// # Errors
/// Those of `weight`, or if the device failed, or a value is not finite.
pub(crate) fn write_params<'w>(
    dir: &PlanDir,
    weight: impl Fn(&str) -> Result<Option<Cow<'w, [u8]>>, RunError>,
    averages: bool,
    device: &mut impl Device,
    rank: usize,
) -> Result<(), RunError> {
    let (plan, origin) = (&dir.plan, Origin::Plan(&dir.path));
    for (index, param) in plan.params.iter_enumerated() {
        let ParamHome::Buffer(buffer) = param.home else { continue };
        if let Some(bytes) = weight(&param.name)? {
            first_values::check(plan, index, (&bytes, param.ty.dtype, 0), origin)?;
            device.write(buffer, 0, &bytes)?;
        }
    }
    for group in &plan.groups {
        for segment in &group.segments {
            let Some((from, to, len)) = group.owned(segment, rank) else { continue };
            let Some(bytes) = weight(&plan.params[segment.param].name)? else { continue };
            let bytes = &bytes[from * 4..(from + len) * 4];
            first_values::check(plan, segment.param, (bytes, DType::F32, from), origin)?;
            for held in convert::held(group) {
                convert::write(device, held, to, bytes, DType::F32)?;
            }
            let states = group.states.iter().filter(|_| averages);
            for average in states.filter(|s| s.name == StateName::Ema) {
                device.write(average.buffer, to * 4, bytes)?;
            }
        }
    }
    Ok(())
}
