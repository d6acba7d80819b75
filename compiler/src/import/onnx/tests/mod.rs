//! Tests of the importer: operators against hand values, what is refused, damaged files, real models.

mod batch_norm;
mod build;
mod calls;
mod control;
mod finite;
mod functions;
mod limits;
mod masks;
mod merged;
mod models;
mod mutants;
mod operators;
mod random;
mod reference;
mod refusals;
mod selected;
mod selection;
mod tied;
