//! A mutant of a target: one input, changed by a number.

use super::mutate::{
    change_archive, change_bytes, change_configuration, change_protobuf, change_safetensors,
    change_text, change_value,
};
use super::origins::Input;
use crate::machine::Random;
use frit_ir::Op;
use serde_json::Value;

/// What mutants are made from.
pub(super) struct Sources {
    /// What is given.
    pub(super) origins: Vec<Input>,
    /// Mutants that led somewhere new after they had been read as what they are meant to be.
    pub(super) deep: Vec<Input>,
    /// The other mutants that led somewhere new.
    pub(super) shallow: Vec<Input>,
}

impl Sources {
    fn pick(&self, random: &mut Random) -> &Input {
        let from = match random.below(16) {
            0..8 if !self.deep.is_empty() => &self.deep,
            8..10 if !self.shallow.is_empty() => &self.shallow,
            _ => &self.origins,
        };
        &from[random.below(from.len())]
    }
}

/// The `number`-th mutant of a target; the first are what is given, as it is.
pub(super) fn mutant(target: &str, number: u64, sources: &Sources) -> Input {
    if let Some(input) = usize::try_from(number).ok().and_then(|n| sources.origins.get(n)) {
        return input.clone();
    }
    let salt = target.bytes().fold(0_u64, |h, b| h.wrapping_mul(31) + u64::from(b));
    let mut random = Random::new(number.wrapping_mul(0x9e37_79b9).wrapping_add(salt << 32));
    let random = &mut random;
    let (input, other) = (sources.pick(random), &sources.pick(random).bytes);
    let structured = random.below(16) > 0;
    let changed = if structured { changed(target, random, input, other) } else { None };
    let bytes = changed.unwrap_or_else(|| {
        let mut bytes = input.bytes.clone();
        change_bytes(random, &mut bytes, other);
        bytes
    });
    Input { origin: input.origin.clone(), bytes }
}

/// The input with changes that leave it what it is; nothing if that is not known.
fn changed(target: &str, random: &mut Random, input: &Input, other: &[u8]) -> Option<Vec<u8>> {
    let bytes = &input.bytes;
    match target {
        "checkpoint" | "data" if input.origin.ends_with(".safetensors") && random.below(2) == 0 => {
            change_safetensors(random, bytes, other)
        }
        "data" if input.origin.ends_with(".npz") => change_archive(random, bytes, other),
        "text" => {
            let mut bytes = bytes.to_vec();
            change_text(random, &mut bytes, other);
            Some(bytes)
        }
        "onnx" => {
            let mut bytes = bytes.to_vec();
            change_protobuf(random, &mut bytes, other);
            Some(bytes)
        }
        "json" => {
            let value = changed_json(random, bytes, other, &Op::names())?;
            Some(value.to_string().into_bytes())
        }
        // Under its old seal a changed plan would be refused for that alone.
        "plan" => {
            let mut value = changed_json(random, bytes, other, &[])?;
            value.as_object_mut()?.remove("sha256");
            let text = serde_json::to_string_pretty(&value).ok()?;
            Some(frit_ir::plan::seal(&text).into_bytes())
        }
        "toml" => {
            let mut value: Value = toml::from_str(std::str::from_utf8(bytes).ok()?).ok()?;
            match random.below(4) {
                0 => {
                    let other =
                        std::str::from_utf8(other).ok().and_then(|t| toml::from_str(t).ok());
                    change_value(random, &mut value, &other.unwrap_or_default(), &[]);
                }
                _ => change_configuration(random, &mut value),
            }
            toml::to_string(&value).ok().map(String::into_bytes)
        }
        _ => Some(changed_json(random, bytes, other, &[])?.to_string().into_bytes()),
    }
}

fn changed_json(random: &mut Random, bytes: &[u8], other: &[u8], words: &[&str]) -> Option<Value> {
    let mut value: Value = serde_json::from_slice(bytes).ok()?;
    let other = serde_json::from_slice(other).unwrap_or_default();
    change_value(random, &mut value, &other, words);
    Some(value)
}
