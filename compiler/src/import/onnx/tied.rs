//! Detects tied embeddings that constant folding untied, by storing the transposed table that a matmul reads as a second
//! initializer.
//!
//! A looked-up table and the right operand of a matmul are one parameter if their values are bit-identical up to the
//! transposition implied by their uses, and so are a parameter and what a call names as a transposition. Other initializers with
//! equal values stay separate: copied modules begin alike.

use super::calls::operation;
use super::context::Bound;
use super::messages::TensorProto;
use super::tensor::{self, Stored};
use super::trainable::{self, Trainable};
use super::{Importer, operands};
use crate::import::Tied;
use frit_ir::ops::{ParamKind, Transpose};
use frit_ir::{Code, Diagnostic, Op, Origin, Region};
use std::collections::{HashMap, HashSet};

/// Pairs of a table and a weight that are compared at most.
const MAX_PAIRS: usize = 1 << 12;
/// Elements by which transposed matrices are looked up.
const STARTS: usize = 16;

impl<'a> Importer<'a> {
    /// The initializers that are copies of a table, if the model has such; as one parameter only if
    /// `model.tie_weights` says so, and with a warning otherwise.
    pub(super) fn tied(&mut self, trainable: &Trainable<'_>) -> HashMap<&'a str, Tied> {
        let mut tied = HashMap::new();
        let mut by_size: HashMap<usize, Vec<&'a TensorProto>> = HashMap::new();
        for copy in self.source.initializer.iter().filter(|t| trainable.is_weight(&t.name)) {
            if let Ok(ty) = tensor::type_of(copy) {
                by_size.entry(ty.shape.numel()).or_default().push(copy);
            }
        }
        let mut pairs = 0;
        for table in &self.source.initializer {
            if !trainable.is_table(&table.name) {
                continue;
            }
            let size = tensor::type_of(table).map_or(0, |ty| ty.shape.numel());
            for &copy in by_size.get(&size).into_iter().flatten() {
                let orientations = implied(table, copy, trainable);
                let known = tied.contains_key(copy.name.as_str());
                if orientations.is_empty() || known || !self.restored.keeps(&copy.name) {
                    continue;
                }
                pairs += 1;
                if pairs > MAX_PAIRS {
                    break;
                }
                let (Ok(own), Ok(other)) =
                    (tensor::read(table, &mut self.files), tensor::read(copy, &mut self.files))
                else {
                    continue;
                };
                let trains = |name: &str, stored: &Stored| {
                    trainable.decide(name, name, stored).0 == ParamKind::Trainable
                };
                if !trains(&table.name, &own) || !trains(&copy.name, &other) {
                    continue;
                }
                if let Some(transposed) = orientations.into_iter().find(|t| equal(&own, &other, *t))
                {
                    let parameter = table.name.clone();
                    tied.insert(copy.name.as_str(), Tied { parameter, transposed });
                }
            }
        }
        if !self.options.tie_weights {
            let mut names: Vec<_> = tied.drain().collect();
            names.sort_by_key(|(name, _)| *name);
            for (name, Tied { parameter, transposed }) in names {
                let how = if transposed { "the transpose of" } else { "equal to" };
                let message = format!("`{name}` is {how} `{parameter}`, and trains separately");
                let help = "if they are one parameter, set model.tie_weights = true, or export \
                            without constant folding";
                self.warnings.push(Diagnostic::warning(Code::TiedCopies, message).help(help));
            }
        }
        tied.extend(self.transposed());
        tied
    }

    /// Matrices that the exporter's optimization stored transposed, where the call that reads one names the transposition.
    fn transposed(&mut self) -> Vec<(&'a str, Tied)> {
        let stored = &self.source.initializer;
        let is_turned = |t: &&TensorProto| {
            let turned = matches!(operation(&t.name), "permute" | "t" | "transpose" | "numpy_t");
            turned && self.restored.computed().iter().any(|(name, _)| *name == t.name)
        };
        let parameters = trainable::listed(self.source, "PARAMETER");
        let parameters: HashSet<&str> = parameters.values().map(String::as_str).collect();
        let read: HashSet<&str> = self.nodes.iter().flat_map(|(_, n)| operands(n)).collect();
        let is_parameter = |t: &&TensorProto| {
            let name = t.name.as_str();
            parameters.contains(name) && read.contains(name) && self.restored.keeps(name)
        };
        let tables: Vec<&TensorProto> = stored.iter().filter(is_parameter).collect();
        let copies: Vec<&TensorProto> = stored.iter().filter(is_turned).collect();
        // Only those are compared whose first elements fit.
        let mut by_start: HashMap<(Vec<i64>, Vec<u8>), Vec<&TensorProto>> = HashMap::new();
        for table in tables.into_iter().filter(|t| t.dims.len() == 2) {
            let dims = table.dims.iter().rev().copied().collect();
            if let Some(start) = self.start(table, true) {
                by_start.entry((dims, start)).or_default().push(table);
            }
        }
        let mut pairs = 0;
        let mut found = Vec::new();
        for copy in copies {
            let Some(start) = self.start(copy, false) else { continue };
            let tables = by_start.get(&(copy.dims.clone(), start)).into_iter().flatten();
            for table in tables.filter(|t| t.data_type == copy.data_type) {
                if pairs == MAX_PAIRS {
                    break;
                }
                pairs += 1;
                let read = [table, copy].map(|proto| tensor::read(proto, &mut self.files));
                let [Ok(own), Ok(other)] = read else { continue };
                if equal(&own, &other, true) {
                    let tied = Tied { parameter: table.name.clone(), transposed: true };
                    found.push((copy.name.as_str(), tied));
                    break;
                }
            }
        }
        found
    }

    /// The first elements of the first row of a matrix, or of its first column.
    fn start(&mut self, proto: &TensorProto, of_column: bool) -> Option<Vec<u8>> {
        let stored = tensor::read(proto, &mut self.files).ok()?;
        let &[rows, columns] = stored.ty.shape.dims() else { return None };
        let (n, step) = if of_column { (rows, columns) } else { (columns, 1) };
        let size = stored.ty.dtype.size();
        let elements = (0..n.min(STARTS)).map(|i| &stored.bytes[i * step * size..][..size]);
        Some(elements.flatten().copied().collect())
    }

    /// Gives the copies the value of their table.
    pub(super) fn tie(&mut self, tied: HashMap<&'a str, Tied>) {
        for (name, copy) in tied {
            let Some(Bound::Value(table)) = self.values.get(copy.parameter.as_str()) else {
                continue;
            };
            let table = *table;
            let perm = Op::Transpose(Transpose { perm: vec![1, 0] });
            let value = match copy.transposed {
                true => self.graph.add1(perm, &[table], Origin::none(), Region::Forward),
                false => Ok(table),
            };
            match value {
                Ok(value) => {
                    self.values.insert(name, Bound::Value(value));
                    self.ties.insert(name.into(), copy);
                }
                Err(error) => {
                    self.report.push(Diagnostic::error(Code::OperandMismatch, error.to_string()))
                }
            }
        }
    }
}

/// Whether `copy` may be `table` transposed, and whether it may be the table as it is.
fn implied(table: &TensorProto, copy: &TensorProto, trainable: &Trainable<'_>) -> Vec<bool> {
    let may_be_copy = table.name != copy.name
        && table.data_type == copy.data_type
        && trainable.is_weight(&copy.name)
        && !trainable.is_table(&copy.name);
    match (&table.dims[..], &copy.dims[..]) {
        ([rows, width], [a, b]) if may_be_copy => {
            let fits = |transposed| if transposed { (b, a) } else { (a, b) } == (rows, width);
            [true, false].into_iter().filter(|transposed| fits(*transposed)).collect()
        }
        _ => Vec::new(),
    }
}

/// Whether the values are equal. Equal elements throughout prove nothing: they are how a weight begins.
fn equal(table: &Stored, copy: &Stored, transposed: bool) -> bool {
    let [rows, width] = *table.ty.shape.dims() else { return false };
    let size = table.ty.dtype.size();
    let at = |row: usize, column: usize| {
        if transposed { column * rows + row } else { row * width + column }
    };
    let same = |row: usize, column: usize| {
        let (i, j) = ((row * width + column) * size, at(row, column) * size);
        table.bytes[i..i + size] == copy.bytes[j..j + size]
    };
    let first = table.bytes.get(..size);
    table.ty.dtype == copy.ty.dtype
        && table.bytes.len() == copy.bytes.len()
        && table.bytes.chunks_exact(size).any(|element| Some(element) != first)
        && (0..rows).all(|row| (0..width).all(|column| same(row, column)))
}
