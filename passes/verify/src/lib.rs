//! The certificate: a proof, pass by pass, that a compilation kept what a training step computes.
