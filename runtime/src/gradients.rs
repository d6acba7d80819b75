//! The first step's gradients, unscaled, unclipped and averaged, by parameter name.

use crate::RunError;
use crate::device::Device;
use crate::tensors::{self, Tensor};
use frit_ir::plan::{GradientSpec, Plan};
use std::collections::BTreeMap;
use std::path::Path;

/// Every group's gradient before the update, in the parts of the ranks.
pub(crate) struct Parts(Vec<Vec<u8>>);

/// Whole gradients by parameter name, f32.
pub(crate) type Gradients = BTreeMap<String, Vec<f32>>;

impl Parts {
    /// Reads them between the last micro-step and the update; empty on ranks other than 0.
    ///
    /// # Errors
    /// If the device or another rank failed.
    pub(crate) fn read(plan: &Plan, device: &impl Device) -> Result<Parts, RunError> {
        let part = |spec: &GradientSpec| {
            let place = &spec.place;
            device.gather(place.buffer, place.offset, place.ty.bytes())
        };
        Ok(Parts(plan.gradients.iter().map(part).collect::<Result<_, _>>()?))
    }

    /// The gradients: the joined parts, divided by the factor of the loss.
    pub(crate) fn combine(&self, plan: &Plan, tokens: f64, loss_scale: f64) -> Gradients {
        let capacity = (plan.loss_capacity * plan.accumulation * plan.world_size) as f64;
        let factor = capacity / tokens.max(1.0) / loss_scale;
        let mut all = Gradients::new();
        for (spec, parts) in plan.gradients.iter().zip(&self.0) {
            let group = &plan.groups[spec.group];
            let bytes = spec.place.ty.bytes();
            let ranks = if group.sharded { plan.world_size } else { 1 };
            for (rank, part) in parts.chunks(bytes.max(1)).take(ranks).enumerate() {
                for segment in &group.segments {
                    let Some((to, from, len)) = group.owned(segment, rank) else { continue };
                    let name = &plan.params[segment.param].name;
                    let whole = all.entry(name.clone()).or_insert_with(|| vec![0.0; segment.numel]);
                    let part = &part[from * 4..(from + len) * 4];
                    for (g, x) in whole[to..to + len].iter_mut().zip(part.as_chunks::<4>().0) {
                        *g = (f64::from(f32::from_le_bytes(*x)) * factor) as f32;
                    }
                }
            }
        }
        all
    }
}

/// Writes them as one `.safetensors` file.
///
/// # Errors
/// If the file system refuses.
pub(crate) fn write(path: &Path, plan: &Plan, gradients: &Gradients) -> Result<(), RunError> {
    let tensor = |(name, values): (&String, &Vec<f32>)| {
        let param = plan.params.iter().find(|p| p.name == *name)?;
        let (dtype, shape) = (safetensors::Dtype::F32, param.ty.shape.0.clone());
        let bytes = values.iter().flat_map(|x| x.to_le_bytes()).collect();
        Some((name.clone(), Tensor { dtype, shape, bytes }))
    };
    tensors::write(path, gradients.iter().filter_map(tensor).collect(), None)
}
