//! Detects constants that the exporter's optimization computed from parameters, whose gradients lack that part.
//!
//! The operations are not in the graph any more. Where a call names a parameter that its nodes do not read, it went into the constant
//! beside them; otherwise the values tell: the exporter's `0 · weight + bias` repeats a vector, a part of a parameter holds elements
//! of it, an increasing or decreasing function keeps their order, and sums and products of two are compared.

use super::{Importer, MAX_LISTED, TensorProto, tensor, trainable};
use frit_ir::{Code, Diagnostic};
use std::collections::{BTreeMap, HashMap, HashSet};

/// Distinct elements that a constant must have, for single values to tell.
const LEAST_DISTINCT: usize = 4;
/// Elements of which the order tells.
const LEAST_ORDERED: usize = 8;
/// Elements that are looked for in a parameter.
const LOOKED_FOR: usize = 64;
/// Elements of parameters that are compared in all.
const MAX_COMPARED: usize = 1 << 26;
/// ONNX's number of f32.
const F32: i32 = 1;

impl Importer<'_> {
    /// Warns of these constants.
    pub(super) fn computed(&mut self) {
        let computed = self.restored.computed().clone();
        let mut found: BTreeMap<String, String> = BTreeMap::new();
        for (constant, parameter) in self.restored.alike() {
            let from = format!("constants, or from parameters (it begins like `{parameter}`)");
            found.insert(constant.clone(), from);
        }
        let mut unknown: Vec<&str> = Vec::new();
        for (constant, parameter) in &computed {
            match parameter {
                Some(parameter) => _ = found.insert(constant.clone(), format!("`{parameter}`")),
                None => unknown.push(constant),
            }
        }
        unknown.retain(|name| !found.contains_key(*name) && !self.ties.contains_key(*name));
        self.by_values(&unknown, &mut found);
        let mut names = found.into_iter();
        let Some((constant, from)) = names.next() else { return };
        let message = format!(
            "the exporter computed the constant `{constant}` from {from}, whose gradient lacks that part"
        );
        let mut warning = Diagnostic::warning(Code::ParametersMissing, message)
            .help("export with optimize=False");
        for (constant, from) in names.take(MAX_LISTED) {
            warning = warning.note(format!("`{constant}` from {from}"));
        }
        self.warnings.push(warning);
    }

    /// Adds constants whose values are those of a function of parameters.
    fn by_values(&mut self, unknown: &[&str], found: &mut BTreeMap<String, String>) {
        let stored: HashMap<&str, &TensorProto> =
            self.source.initializer.iter().map(|t| (t.name.as_str(), t)).collect();
        let mut constants: Vec<Constant> = Vec::new();
        for name in unknown {
            let floats = stored.get(name).and_then(|proto| self.floats(proto));
            constants.extend(floats.and_then(|values| Constant::new(name, values)));
        }
        let parameters = trainable::listed(self.source, "PARAMETER");
        let mut names: Vec<&String> = parameters.values().collect();
        names.sort();
        let mut of_size: HashMap<usize, Vec<(&str, Vec<f32>)>> = HashMap::new();
        let mut compared = 0_usize;
        for name in names {
            let Some(proto) = stored.get(name.as_str()).filter(|_| !constants.is_empty()) else {
                continue;
            };
            let Some(values) = self.floats(proto) else { continue };
            compared = compared.saturating_add(values.len().saturating_mul(constants.len()));
            if compared > MAX_COMPARED {
                break;
            }
            constants.retain(|constant| {
                let is_of = constant.is_part_of(&values)
                    || constant.is_function_of(&values)
                    || constant.repeats(&values);
                if is_of {
                    found.insert(constant.name.clone(), format!("`{name}`"));
                }
                !is_of
            });
            if constants.iter().any(|c| c.values.len() == values.len()) {
                of_size.entry(values.len()).or_default().push((name, values));
            }
        }
        for constant in &constants {
            let same = of_size.get(&constant.values.len()).map_or(&[][..], Vec::as_slice);
            for (i, (a, first)) in same.iter().enumerate() {
                for (b, second) in &same[i + 1..] {
                    compared = compared.saturating_add(first.len());
                    if compared > MAX_COMPARED {
                        return;
                    }
                    if constant.combines(first, second) {
                        found.insert(constant.name.clone(), format!("`{a}` and `{b}`"));
                    }
                }
            }
        }
    }

    /// The elements of an f32 tensor.
    fn floats(&mut self, proto: &TensorProto) -> Option<Vec<f32>> {
        if proto.data_type != F32 {
            return None;
        }
        let stored = tensor::read(proto, &mut self.files).ok()?;
        let (elements, _) = stored.bytes.as_chunks::<4>();
        Some(elements.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect())
    }
}

/// A constant whose values may tell what it was computed from.
struct Constant {
    name: String,
    values: Vec<f32>,
    /// Some of its distinct elements.
    sample: HashSet<u32>,
}

impl Constant {
    /// `None` if all elements are equal.
    fn new(name: &str, values: Vec<f32>) -> Option<Constant> {
        let step = (values.len() / LOOKED_FOR).max(1);
        let sample: HashSet<u32> = values.iter().step_by(step).map(|x| x.to_bits()).collect();
        (sample.len() > 1).then(|| Constant { name: name.into(), values, sample })
    }

    /// Whether all of the elements that are looked for are some of these. Numbers of few bits, such as powers of two, are among those of
    /// every parameter that was rounded.
    fn is_part_of(&self, parameter: &[f32]) -> bool {
        let long = self.sample.iter().filter(|x| **x & 0xffff != 0).count();
        let found = parameter.iter().map(|x| x.to_bits()).filter(|x| self.sample.contains(x));
        long >= LEAST_DISTINCT
            && self.values.len() <= parameter.len()
            && found.collect::<HashSet<u32>>().len() == self.sample.len()
    }

    /// Whether its elements are repeated by rows.
    fn repeats(&self, parameter: &[f32]) -> bool {
        let rows = self.values.chunks_exact(parameter.len().max(1));
        self.values.len() > parameter.len() && rows.remainder().is_empty() && {
            let bits = |x: &f32| x.to_bits();
            rows.into_iter().all(|row| row.iter().map(bits).eq(parameter.iter().map(bits)))
        }
    }

    /// Whether its elements are in the order of these, or in the opposite one. Where they go up or down for long, that proves nothing.
    fn is_function_of(&self, parameter: &[f32]) -> bool {
        let n = parameter.len();
        if n != self.values.len() || n < LEAST_ORDERED {
            return false;
        }
        let turns = parameter.windows(3).filter(|w| (w[1] > w[0]) != (w[2] > w[1])).count();
        let mut order: Vec<usize> = (0..n).collect();
        order.sort_by(|a, b| parameter[*a].total_cmp(&parameter[*b]));
        let goes = |is_next: fn(f32, f32) -> bool| {
            order.windows(2).all(|w| {
                parameter[w[0]] < parameter[w[1]] && is_next(self.values[w[0]], self.values[w[1]])
            })
        };
        turns >= n / 4 && (goes(|a, b| a < b) || goes(|a, b| a > b))
    }

    /// Whether it is their sum, difference, product or quotient.
    fn combines(&self, a: &[f32], b: &[f32]) -> bool {
        let operations: [fn(f32, f32) -> f32; 6] =
            [|a, b| a + b, |a, b| a - b, |a, b| b - a, |a, b| a * b, |a, b| a / b, |a, b| b / a];
        let is_of = |f: &fn(f32, f32) -> f32| {
            let pairs = a.iter().zip(b).zip(&self.values);
            pairs.into_iter().all(|((a, b), found)| {
                let expected = f(*a, *b);
                expected.is_finite() && (expected - found).abs() <= 1e-6 * expected.abs().max(1e-3)
            })
        };
        let distinct = |values: &[f32]| {
            let bits = values.iter().take(LOOKED_FOR).map(|x| x.to_bits());
            bits.collect::<HashSet<u32>>().len()
        };
        self.sample.len() >= LEAST_DISTINCT
            && [a, b].iter().all(|values| distinct(values) >= LEAST_DISTINCT)
            && operations.iter().any(is_of)
    }
}
