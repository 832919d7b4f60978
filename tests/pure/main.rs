//! What needs no cluster: renderings against golden files, the plan as tables and properties, the checked-in
//! manifests against what the program prints.

mod fixture;
mod manifests;
mod plan;
mod render;
mod world;
