//! What several test files share. Each uses a part of it.
#![allow(dead_code)]

pub mod filters;
pub mod update;

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use gradprism::rollout::{Batch, Content, Group, Trajectory};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use serde_json::{Value, json};

/// A file of `tests/fixtures`.
pub fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name)
}

/// A file of `configs`.
pub fn config(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("configs").join(name)
}

/// Small tensors gain nothing from threads, and tests that run side by side lose by them. Each test
/// thread has a setting of its own.
pub fn one_thread() {
    tch::set_num_threads(1);
}

/// The program with arguments; `RUST_BACKTRACE` off, as users have it.
pub fn gradprism(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_gradprism"));
    command.args(arguments).env_remove("RUST_BACKTRACE").env("OMP_NUM_THREADS", "1");
    command
}

pub fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// The Python named by `GRADPRISM_PYTHON`, or a loud word that the test is skipped.
pub fn python(test: &str) -> Option<PathBuf> {
    let python = std::env::var_os("GRADPRISM_PYTHON").map(PathBuf::from);
    if python.is_none() {
        eprintln!("SKIPPED {test}: set GRADPRISM_PYTHON to a Python with torch and tensorboard");
    }
    python
}

/// A tiny model of this shape, exported as `examples/export_hf.py` does it; none, and a word, if that
/// Python has no transformers.
pub fn export_hf(python: &Path, shape: &str, folder: &Path) -> Option<PathBuf> {
    let checkpoint = folder.join("policy.pt");
    let output = Command::new(python)
        .arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/export_hf.py"))
        .args(["--random-tiny", shape, "--out"])
        .arg(&checkpoint)
        .output()
        .unwrap();
    if stderr(&output).contains("No module named 'transformers'") {
        eprintln!("SKIPPED: that Python has no transformers");
        return None;
    }
    assert!(output.status.success(), "{}", stderr(&output));
    Some(checkpoint)
}

/// `|found − expected| <= tolerance·scale`.
#[track_caller]
pub fn assert_close(found: f64, expected: f64, tolerance: f64, scale: f64, what: &str) {
    let error = (found - expected).abs();
    assert!(
        error <= tolerance * scale,
        "{what}: found {found}, expected {expected}; {error:e} apart at scale {scale:e}"
    );
}

/// Rollouts for the fixtures, of vocabulary 16: `groups` groups of 4 rows of mixed lengths, with
/// observation tokens inside, and every optional array. In the second group all rewards are equal.
pub fn synthetic_batch(groups: usize, seed: u64) -> Batch {
    let mut random = ChaCha8Rng::seed_from_u64(seed);
    let mut line = 0;
    let groups = (0..groups)
        .map(|group| {
            let prompt_ids: Vec<i64> =
                (0..random.random_range(1..6)).map(|_| random.random_range(0..16)).collect();
            let trajectories = (0..4)
                .map(|row| {
                    line += 1;
                    let length = random.random_range(2..9);
                    let response_ids = (0..length).map(|_| random.random_range(0..16)).collect();
                    let mut mask: Vec<bool> =
                        (0..length).map(|_| random.random_bool(0.8)).collect();
                    mask[length - 1] = true;
                    let mut numbers = |low: f64, high: f64| -> Vec<f64> {
                        mask.iter()
                            .map(|sampled| {
                                let number = random.random_range(low..high);
                                if *sampled { number } else { 0.0 }
                            })
                            .collect()
                    };
                    let old_logprobs = numbers(-3.4, -2.2);
                    let ref_logprobs = numbers(-3.4, -2.2);
                    let values = numbers(-1.0, 1.0);
                    let reward = if group == 1 { 0.1 } else { random.random_range(0.0..1.0) };
                    Trajectory {
                        line,
                        id: Some(format!("{group}/{row}")),
                        content: Content::Tokens { prompt_ids: prompt_ids.clone(), response_ids },
                        mask,
                        reward,
                        token_rewards: None,
                        old_logprobs: Some(old_logprobs),
                        ref_logprobs: Some(ref_logprobs),
                        sampler_logprobs: None,
                        values: Some(values),
                        reasoning: None,
                    }
                })
                .collect();
            Group { id: format!("g{group}"), trajectories }
        })
        .collect();
    Batch { step: None, groups }
}

/// A batch as lines of native JSONL.
pub fn lines(batch: &Batch) -> Vec<Value> {
    batch
        .groups
        .iter()
        .flat_map(|group| {
            group.trajectories.iter().map(|row| {
                let mut line = json!({
                    "group_id": group.id,
                    "response_mask": row.mask.iter().map(|m| u8::from(*m)).collect::<Vec<u8>>(),
                    "reward": row.reward,
                });
                match &row.content {
                    Content::Tokens { prompt_ids, response_ids } => {
                        line["prompt_ids"] = json!(prompt_ids);
                        line["response_ids"] = json!(response_ids);
                    }
                    Content::Steps { observations, shape, actions } => {
                        let width = shape.iter().product::<i64>() as usize;
                        line["observations"] =
                            json!(observations.chunks(width).collect::<Vec<_>>());
                        line["actions"] = json!(actions);
                    }
                }
                for (key, array) in [
                    ("old_logprobs", &row.old_logprobs),
                    ("ref_logprobs", &row.ref_logprobs),
                    ("values", &row.values),
                    ("token_rewards", &row.token_rewards),
                ] {
                    if let Some(array) = array {
                        line[key] = json!(array);
                    }
                }
                if let Some(id) = &row.id {
                    line["trajectory_id"] = json!(id);
                }
                if let Some(step) = batch.step {
                    line["step"] = json!(step);
                }
                line
            })
        })
        .collect()
}

/// Writes lines of JSONL.
pub fn write_lines(path: &Path, lines: &[Value]) {
    let text: String = lines.iter().map(|line| format!("{line}\n")).collect();
    std::fs::write(path, text).unwrap();
}

/// A folder with a study of a fixture: `rollouts.jsonl` and `study.yaml`.
pub struct StudyFolder {
    pub folder: tempfile::TempDir,
}

impl StudyFolder {
    /// The checkpoint is a fixture; `yaml` holds further sections.
    pub fn new(checkpoint: &Path, lines: &[Value], yaml: &str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        write_lines(&folder.path().join("rollouts.jsonl"), lines);
        let text = format!(
            "policy:\n  checkpoint: {}\nrollouts:\n  path: rollouts.jsonl\n{yaml}",
            checkpoint.display()
        );
        std::fs::write(folder.path().join("study.yaml"), text).unwrap();
        Self { folder }
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Runs the study into `out` of the folder.
    pub fn run(&self, arguments: &[&str]) -> Output {
        self.run_command("study", arguments)
    }

    /// Runs another command with the same configuration.
    pub fn run_command(&self, command: &str, arguments: &[&str]) -> Output {
        let (config, out) = (self.path("study.yaml"), self.path("out"));
        let mut command = gradprism(&[command]);
        command.arg(config).arg("--out").arg(out).args(arguments);
        command.output().unwrap()
    }

    /// The lines of `prompts.jsonl`.
    pub fn prompts(&self) -> Vec<Value> {
        let text = std::fs::read_to_string(self.path("out/prompts.jsonl")).unwrap();
        text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    }

    pub fn summary(&self) -> Value {
        serde_json::from_str(&std::fs::read_to_string(self.path("out/summary.json")).unwrap())
            .unwrap()
    }

    /// Whether anything but the inputs is there.
    pub fn has_output(&self) -> bool {
        std::fs::read_dir(self.folder.path()).unwrap().any(|entry| {
            !matches!(entry.unwrap().file_name().to_str(), Some("rollouts.jsonl" | "study.yaml"))
        })
    }
}

/// What `trainer_reference.py` makes of a task; none without Python.
pub fn trainer_reference(test: &str, command: &str, task: &Value) -> Option<Value> {
    let python = python(test)?;
    let folder = tempfile::tempdir().unwrap();
    let (given, answer) = (folder.path().join("task.json"), folder.path().join("answer.json"));
    std::fs::write(&given, task.to_string()).unwrap();
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/trainer_reference.py");
    let output =
        Command::new(python).arg(script).arg(command).arg(given).arg(&answer).output().unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
    Some(serde_json::from_str(&std::fs::read_to_string(answer).unwrap()).unwrap())
}
