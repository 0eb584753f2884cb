//! Checkpoints: what Python makes of them, what a kill and a damaged disk leave, and that a run goes
//! on from one bit for bit.

mod common;

use std::cell::{Cell, RefCell};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::time::{Duration, Instant};

use common::fixture;
use common::update::Whole;
use gradprism::objective::Preset;
use gradprism::policy::{Policy, PolicyOptions};
use gradprism::rollout::Batch;
use gradprism::trainer::checkpoint::{
    Disk, DiskFile, FileSystem, latest, restore_torch_generator, torch_generator,
};
use gradprism::trainer::{
    AdamW, AdamWOptions, Checkpoint, CheckpointStore, Decay, Keep, Optimizer, Schedule,
};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use regex::Regex;
use serde_json::{Value, json};
use tch::{Device, Kind, Tensor};

const LAST_TWO: Keep = Keep { last: 2, best: false };

fn load(path: &Path, trainable: &str) -> Policy {
    common::one_thread();
    let options =
        PolicyOptions { trainable: Regex::new(trainable).unwrap(), ..PolicyOptions::default() };
    Policy::load(path, &options).unwrap()
}

fn optimizer(policy: &Policy) -> Optimizer {
    let options = AdamWOptions { learning_rate: 0.01, ..AdamWOptions::default() };
    let schedule = Schedule { warmup: 2, decay: Decay::Cosine { updates: 9, floor: 0.1 } };
    Optimizer::new(AdamW::of_policy(options, policy).unwrap(), schedule, Some(0.5), 3).unwrap()
}

/// One update over micro-batches that a generator draws, with noise of libtorch's generator.
fn update(policy: &Policy, optimizer: &mut Optimizer, batch: &Batch, random: &mut ChaCha8Rng) {
    let whole = Whole::new(Preset::Grpo.algorithm(), batch);
    let mut start = 0;
    while start < whole.rows.len() {
        let count = random.random_range(1..=7).min(whole.rows.len() - start);
        let loss = whole.loss(policy, start, count);
        let noise = Tensor::randn([1], (loss.kind(), Device::Cpu)).exp().squeeze();
        optimizer.backward(&(loss * noise)).unwrap();
        start += count;
    }
    assert!(optimizer.step().unwrap().made);
}

/// The bits of all weights and of the optimiser's state.
fn bits(policy: &Policy, optimizer: &Optimizer) -> Vec<Vec<u8>> {
    let bytes = |tensor: &Tensor| {
        let mut bytes = vec![0; tensor.numel() * tensor.kind().elt_size_in_bytes()];
        tensor.detach().contiguous().copy_data_u8(&mut bytes, tensor.numel());
        bytes
    };
    let weights = policy.parameters().iter().map(|parameter| bytes(&parameter.tensor));
    weights.chain(optimizer.state().iter().map(|(_, tensor)| bytes(tensor))).collect()
}

fn names(folder: &Path) -> Vec<String> {
    let mut names: Vec<String> = std::fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

#[test]
fn a_run_goes_on_from_a_checkpoint_bit_for_bit() {
    for name in ["gpt2.pt", "double.pt", "bf16.pt"] {
        let folder = tempfile::tempdir().unwrap();
        let mut store = CheckpointStore::open(folder.path(), LAST_TWO).unwrap();
        let batch = common::synthetic_batch(4, 5);
        let policy = load(&fixture(name), "blocks|wte");
        let mut adamw = optimizer(&policy);
        let mut random = ChaCha8Rng::seed_from_u64(1);
        tch::manual_seed(1);
        for _ in 0..3 {
            update(&policy, &mut adamw, &batch, &mut random);
        }
        let mut writer = store.begin(3).unwrap();
        writer.policy("policy.pt", &policy).unwrap();
        writer.tensors("optimizer.safetensors", &adamw.state()).unwrap();
        writer.json("random.json", &random).unwrap();
        let torch = [("cpu".to_owned(), torch_generator(Device::Cpu).unwrap())];
        writer.tensors("random.safetensors", &torch).unwrap();
        writer.json("extra.json", &json!({"ema": 0.1 + 0.2, "kept": [3, 4]})).unwrap();
        writer.commit(Some(0.5)).unwrap();
        let saved = bits(&policy, &adamw);
        for _ in 0..3 {
            update(&policy, &mut adamw, &batch, &mut random);
        }
        let undisturbed = bits(&policy, &adamw);
        assert_ne!(undisturbed, saved);

        let found = latest(folder.path()).unwrap().unwrap();
        assert!(found.damaged.is_empty());
        let found = found.checkpoint;
        assert_eq!((found.step(), found.score()), (3, Some(0.5)));
        let extra: Value = found.json("extra.json").unwrap();
        assert_eq!(extra, json!({"ema": 0.1 + 0.2, "kept": [3, 4]}));
        let policy = load(&found.file("policy.pt").unwrap(), "blocks|wte");
        let mut adamw = optimizer(&policy);
        adamw.restore(&found.tensors("optimizer.safetensors").unwrap()).unwrap();
        assert_eq!(bits(&policy, &adamw), saved, "{name}");
        let mut random: ChaCha8Rng = found.json("random.json").unwrap();
        let torch = found.tensors("random.safetensors").unwrap().remove(0).1;
        restore_torch_generator(Device::Cpu, &torch).unwrap();
        for _ in 0..3 {
            update(&policy, &mut adamw, &batch, &mut random);
        }
        assert!(bits(&policy, &adamw) == undisturbed, "{name}: another way after the checkpoint");
        // With another state of either generator it would be another way.
        assert_ne!(torch, torch_generator(Device::Cpu).unwrap());
    }
}

#[test]
fn python_gives_the_logits_of_a_trained_policy() {
    for (name, trainable) in [("double.pt", ""), ("gpt2.pt", r"blocks\.1|ln_f"), ("bf16.pt", "")] {
        let folder = tempfile::tempdir().unwrap();
        let mut store = CheckpointStore::open(folder.path(), LAST_TWO).unwrap();
        let policy = load(&fixture(name), trainable);
        let mut adamw = optimizer(&policy);
        let mut random = ChaCha8Rng::seed_from_u64(2);
        for _ in 0..3 {
            update(&policy, &mut adamw, &common::synthetic_batch(3, 6), &mut random);
        }
        let mut writer = store.begin(3).unwrap();
        writer.policy("policy.pt", &policy).unwrap();
        let path = writer.commit(None).unwrap().path.join("policy.pt");
        // What is not trained requires no gradient here, and still none after saving.
        let left_out = |p: &&gradprism::policy::Parameter| !p.trainable;
        assert_eq!(policy.parameters().iter().any(|p| left_out(&p)), !trainable.is_empty());
        assert!(policy.parameters().iter().all(|p| p.tensor.requires_grad() == p.trainable));

        let rows = [[1i64, 5, 2, 9, 11, 3], [4, 4, 7, 0, 15, 8]];
        let ids = Tensor::from_slice(&rows.concat()).reshape([2, 6]);
        let logits = policy.token_logits(&ids, &ids.ones_like()).unwrap();
        let start = load(&fixture(name), "").token_logits(&ids, &ids.ones_like()).unwrap();
        let moved = (&logits - start).abs().max().double_value(&[]);
        assert!(moved > 1e-3, "{name} was trained: {moved:e}");
        let reloaded = load(&path, trainable);
        assert_eq!(reloaded.token_logits(&ids, &ids.ones_like()).unwrap(), logits, "{name}");
        let tied = reloaded.parameters().iter().filter(|p| p.names.len() == 2).count();
        assert_eq!((tied, reloaded.parameters().len()), (1, policy.parameters().len()));

        let task = json!({"policy": path, "ids": rows});
        let test = "python_gives_the_logits_of_a_trained_policy";
        let Some(answer) = common::trainer_reference(test, "logits", &task) else { return };
        assert_eq!(answer["tied"], json!([["wte.weight", "lm_head.weight"]]));
        assert_eq!(answer["without_gradient"], json!([]), "all of the fixture require one");
        assert_eq!(answer["training"], json!(false));
        let expected: Vec<f64> = serde_json::from_value(answer["logits"].clone()).unwrap();
        let found: Vec<f64> = Vec::try_from(logits.to_kind(Kind::Double).reshape([-1])).unwrap();
        assert_eq!(found.len(), expected.len());
        for (found, expected) in found.iter().zip(expected) {
            common::assert_close(*found, expected, 1e-6, 1.0, name);
        }
    }
}

/// A disk that fails from one operation on, for ever: the process was killed, or the disk is full.
#[derive(Clone)]
struct Failing {
    left: Rc<Cell<usize>>,
    /// Whether folders can still be removed.
    removes: bool,
    log: Rc<RefCell<Vec<(&'static str, PathBuf)>>>,
}

impl Failing {
    fn after(operations: usize, removes: bool) -> Self {
        Self { left: Rc::new(Cell::new(operations)), removes, log: Rc::default() }
    }

    fn spend(&self, what: &'static str, path: &Path) -> io::Result<()> {
        let left = self.left.get();
        if left == 0 {
            return Err(io::Error::from_raw_os_error(28));
        }
        self.left.set(left - 1);
        self.log.borrow_mut().push((what, path.to_path_buf()));
        Ok(())
    }
}

impl Disk for Failing {
    fn make_folder(&self, path: &Path) -> io::Result<()> {
        self.spend("make", path)?;
        FileSystem.make_folder(path)
    }

    fn create(&self, path: &Path) -> io::Result<Box<dyn DiskFile>> {
        self.spend("create", path)?;
        let file = FileSystem.create(path)?;
        Ok(Box::new(FailingFile { disk: self.clone(), path: path.to_path_buf(), file }))
    }

    fn sync_folder(&self, path: &Path) -> io::Result<()> {
        self.spend("sync folder", path)?;
        FileSystem.sync_folder(path)
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        self.spend("rename", to)?;
        FileSystem.rename(from, to)
    }

    fn remove_folder(&self, path: &Path) -> io::Result<()> {
        if !self.removes {
            self.spend("remove", path)?;
        }
        FileSystem.remove_folder(path)
    }
}

struct FailingFile {
    disk: Failing,
    path: PathBuf,
    file: Box<dyn DiskFile>,
}

impl Write for FailingFile {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let part = &bytes[..bytes.len().min(1000)];
        match self.disk.spend("write", &self.path) {
            Ok(()) => self.file.write_all(part).map(|()| part.len()),
            // A part of it still got there.
            Err(error) => self.file.write_all(&part[..part.len() / 2]).and(Err(error)),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}

impl DiskFile for FailingFile {
    fn sync(&mut self) -> io::Result<()> {
        self.disk.spend("sync", &self.path)?;
        self.file.sync()
    }
}

/// Saves a checkpoint of a step, whose content can be told from its step.
fn save(store: &mut CheckpointStore, step: u64, score: Option<f64>) -> gradprism::Result<()> {
    let mut writer = store.begin(step)?;
    let tensor = Tensor::full([1500], step as f64, (Kind::Double, Device::Cpu));
    writer.tensors("state.safetensors", &[("all".to_owned(), tensor)])?;
    writer.json("extra.json", &json!({"step": step}))?;
    let committed = writer.commit(score)?;
    assert!(committed.path.ends_with(format!("{:06}-step-{step}", serial(&committed.path))));
    Ok(())
}

fn serial(path: &Path) -> u64 {
    path.file_name().unwrap().to_str().unwrap().split('-').next().unwrap().parse().unwrap()
}

/// The newest checkpoint of a folder, whose content is that of its step.
fn newest(folder: &Path) -> Checkpoint {
    let checkpoint = latest(folder).unwrap().unwrap().checkpoint;
    let extra: Value = checkpoint.json("extra.json").unwrap();
    assert_eq!(extra["step"], checkpoint.step());
    let tensor = &checkpoint.tensors("state.safetensors").unwrap()[0].1;
    assert_eq!(tensor.eq(checkpoint.step() as f64).sum(Kind::Int64).int64_value(&[]), 1500);
    checkpoint
}

#[test]
fn a_kill_between_any_two_operations_leaves_a_whole_checkpoint() {
    let mut outcomes = [0; 3];
    for operations in 0.. {
        let folder = tempfile::tempdir().unwrap();
        for step in [10, 20] {
            save(&mut CheckpointStore::open(folder.path(), LAST_TWO).unwrap(), step, None).unwrap();
        }
        let disk = Failing::after(usize::MAX, false);
        let mut store =
            CheckpointStore::on(Box::new(disk.clone()), folder.path(), LAST_TWO).unwrap();
        disk.left.set(operations);
        let saved = save(&mut store, 30, None);
        let step = newest(folder.path()).step();
        // One is there once it is in place, and it is there if the store says so.
        outcomes[match (saved.is_ok(), step) {
            (false, 20) => 0,
            (false, 30) => 1,
            (true, 30) => 2,
            other => panic!("after {operations} operations: {other:?}"),
        }] += 1;
        // The next process goes on, and clears up.
        save(&mut CheckpointStore::open(folder.path(), LAST_TWO).unwrap(), 40, None).unwrap();
        assert_eq!(newest(folder.path()).step(), 40);
        let names = names(folder.path());
        assert_eq!(names.len(), 2, "{names:?}");
        if disk.left.get() > 0 {
            break;
        }
    }
    // Failures before it is in place, between rename and sync, and after, where an old one is renamed
    // and removed; the last two saves had operations enough.
    assert!(outcomes[0] > 20 && outcomes[1] == 1 && outcomes[2] == 4, "{outcomes:?}");
}

#[test]
fn a_power_cut_finds_everything_on_the_disk() {
    let folder = tempfile::tempdir().unwrap();
    let disk = Failing::after(usize::MAX, false);
    let mut store = CheckpointStore::on(Box::new(disk.clone()), folder.path(), LAST_TWO).unwrap();
    for step in 1..=2 {
        save(&mut store, step, None).unwrap();
    }
    disk.log.borrow_mut().clear();
    save(&mut store, 3, None).unwrap();
    let log = disk.log.borrow();
    let find = |what: &str, path: &Path| {
        log.iter().rposition(|(found, at)| *found == what && at == path).unwrap()
    };
    let staging = folder.path().join(".partial");
    let placed = find("rename", &folder.path().join("000003-step-3"));
    for name in ["state.safetensors", "extra.json", "manifest.json"] {
        let file = staging.join(name);
        assert!(find("write", &file) < find("sync", &file));
        // The manifest comes last.
        assert!(find("sync", &file) <= find("sync", &staging.join("manifest.json")));
        assert!(find("sync", &file) < find("sync folder", &staging));
    }
    assert!(find("sync folder", &staging) < placed);
    assert!(placed < find("sync folder", folder.path()));
    assert!(find("sync folder", folder.path()) < find("rename", &folder.path().join(".removed")));
}

#[test]
fn a_full_disk_is_named_and_costs_nothing_but_the_checkpoint() {
    let folder = tempfile::tempdir().unwrap();
    let policy = load(&fixture("gpt2.pt"), "");
    let mut refused = 0;
    for operations in 0.. {
        let disk = Failing::after(usize::MAX, true);
        let mut store =
            CheckpointStore::on(Box::new(disk.clone()), folder.path(), LAST_TWO).unwrap();
        if operations == 0 {
            save(&mut store, 7, None).unwrap();
        }
        let before = names(folder.path());
        disk.left.set(operations);
        let mut save = || -> gradprism::Result<()> {
            let mut writer = store.begin(8)?;
            writer.policy("policy.pt", &policy)?;
            writer.commit(None)?;
            Ok(())
        };
        match save() {
            Ok(()) => break,
            Err(error) => {
                let message = error.to_string();
                for part in ["the checkpoint of step 8 was not saved", "No space left on device"] {
                    assert!(message.contains(part), "{message}");
                }
                refused += 1;
            }
        }
        if names(folder.path()) != before {
            // It was in place, and only the sync of its name failed.
            assert_eq!(latest(folder.path()).unwrap().unwrap().checkpoint.step(), 8);
        }
    }
    assert!(refused > 20, "{refused}");
    assert!(policy.parameters().iter().all(|p| p.tensor.requires_grad()));
}

#[test]
fn a_failed_file_cannot_be_committed() {
    let folder = tempfile::tempdir().unwrap();
    let mut store = CheckpointStore::open(folder.path(), LAST_TWO).unwrap();
    let mut writer = store.begin(1).unwrap();
    writer.json("a.json", &1).unwrap();
    let complex = Tensor::zeros([2], (Kind::ComplexFloat, Device::Cpu));
    let error = writer.tensors("b.safetensors", &[("z".into(), complex)]).unwrap_err().to_string();
    assert!(error.contains("ComplexFloat cannot be saved"), "{error}");
    for name in ["a.json", "manifest.json", "../b", ".", ""] {
        assert!(writer.json(name, &1).is_err(), "{name}");
    }
    assert!(writer.commit(None).is_err());
    assert!(names(folder.path()).is_empty());
    drop(store.begin(2).unwrap());
    assert!(names(folder.path()).is_empty());
}

#[test]
fn an_unwritable_folder_is_refused_at_once() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("file");
    std::fs::write(&file, "").unwrap();
    let error = CheckpointStore::open(&file.join("checkpoints"), LAST_TWO).err().unwrap();
    assert!(error.to_string().contains("file/checkpoints: cannot be made"), "{error}");
    let disk = Failing::after(1, false);
    let error = CheckpointStore::on(Box::new(disk), folder.path(), LAST_TWO).err().unwrap();
    assert!(error.to_string().contains("checkpoints cannot be written there"), "{error}");
}

#[test]
fn a_damaged_newest_checkpoint_gives_way_to_the_one_before() {
    type Damage = fn(&Path);
    fn edit(path: &Path, of: impl FnOnce(&mut Vec<u8>)) {
        let mut bytes = std::fs::read(path).unwrap();
        of(&mut bytes);
        std::fs::write(path, bytes).unwrap();
    }
    let damages: [(&str, Damage); 7] = [
        ("state.safetensors has 1", |path| {
            edit(&path.join("state.safetensors"), |bytes| bytes.truncate(100));
        }),
        ("state.safetensors is damaged", |path| {
            edit(&path.join("state.safetensors"), |bytes| bytes[5000] ^= 1);
        }),
        ("extra.json cannot be read", |path| {
            std::fs::remove_file(path.join("extra.json")).unwrap()
        }),
        ("manifest.json cannot be read", |path| {
            std::fs::remove_file(path.join("manifest.json")).unwrap()
        }),
        ("manifest.json is damaged", |path| {
            edit(&path.join("manifest.json"), |bytes| bytes.truncate(20));
        }),
        ("manifest.json is damaged: its checksum", |path| {
            let text = std::fs::read_to_string(path.join("manifest.json")).unwrap();
            let other = text.replace("\"score\": 0.5", "\"score\": 0.9");
            assert_ne!(other, text);
            std::fs::write(path.join("manifest.json"), other).unwrap();
        }),
        ("is of format 9", |path| {
            let text = std::fs::read_to_string(path.join("manifest.json")).unwrap();
            let other = text.replace("\"format\": 1", "\"format\": 9");
            std::fs::write(path.join("manifest.json"), other).unwrap();
        }),
    ];
    for (word, damage) in damages {
        let folder = tempfile::tempdir().unwrap();
        let mut store = CheckpointStore::open(folder.path(), LAST_TWO).unwrap();
        assert_eq!(store.latest().unwrap(), None);
        save(&mut store, 1, None).unwrap();
        save(&mut store, 2, Some(0.5)).unwrap();
        damage(&folder.path().join("000002-step-2"));
        let found = store.latest().unwrap().unwrap();
        assert_eq!((found.checkpoint.step(), found.damaged.len()), (1, 1));
        assert!(found.damaged[0].contains("000002-step-2"), "{:?}", found.damaged);
        assert!(found.damaged[0].contains(word), "{word}: {:?}", found.damaged);
        // The way from there is the newest one, though its steps are not higher.
        save(&mut store, 2, None).unwrap();
        assert_eq!(newest(folder.path()).path(), folder.path().join("000003-step-2"));

        for name in names(folder.path()) {
            let _ = std::fs::remove_file(folder.path().join(name).join("extra.json"));
        }
        let error = store.latest().unwrap_err().to_string();
        assert!(error.contains("none of its checkpoints is whole"), "{error}");
    }
    assert_eq!(latest("no/such/folder".as_ref()).unwrap(), None);
}

#[test]
fn the_last_and_the_best_stay() {
    let folder = tempfile::tempdir().unwrap();
    let mut store = CheckpointStore::open(folder.path(), Keep { last: 2, best: true }).unwrap();
    let steps = |folder: &Path| -> Vec<u64> {
        names(folder)
            .iter()
            .map(|name| name.split("-step-").nth(1).unwrap().parse().unwrap())
            .collect()
    };
    let scores = [None, Some(0.3), Some(0.8), Some(0.8), Some(f64::INFINITY), Some(0.1), Some(0.9)];
    let kept: [&[u64]; 7] = [&[1], &[1, 2], &[2, 3], &[3, 4], &[3, 4, 5], &[3, 5, 6], &[6, 7]];
    for ((step, score), kept) in (1..).zip(scores).zip(kept) {
        save(&mut store, step, score).unwrap();
        assert_eq!(steps(folder.path()), kept, "after step {step}");
    }
    let mut store = CheckpointStore::open(folder.path(), Keep { last: 0, best: false }).unwrap();
    save(&mut store, 8, None).unwrap();
    assert_eq!(steps(folder.path()), [8]);
    // What is none of ours is left alone.
    std::fs::create_dir(folder.path().join("notes")).unwrap();
    save(&mut store, 9, None).unwrap();
    assert_eq!(names(folder.path()), ["000009-step-9", "notes"]);
    assert_eq!(newest(folder.path()).score(), None);
}

/// Saves one checkpoint after the other until it is killed; the part of
/// `kills_at_random_moments_cost_nothing_that_was_saved` that it starts, and nothing elsewhere.
#[test]
fn the_process_that_is_killed() {
    let Some(folder) = std::env::var_os("GRADPRISM_TEST_STORE").map(PathBuf::from) else { return };
    let mut store = CheckpointStore::open(&folder, LAST_TWO).unwrap();
    let next = latest(&folder).unwrap().map_or(0, |found| found.checkpoint.step()) + 1;
    for step in next.. {
        save(&mut store, step, None).unwrap();
    }
}

#[test]
fn kills_at_random_moments_cost_nothing_that_was_saved() {
    let folder = tempfile::tempdir().unwrap();
    let mut random = ChaCha8Rng::seed_from_u64(11);
    let mut reached = 0;
    for _ in 0..20 {
        let mut child = std::process::Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "the_process_that_is_killed"])
            .env("GRADPRISM_TEST_STORE", folder.path())
            .stdout(std::process::Stdio::null())
            .spawn()
            .unwrap();
        let began = Instant::now();
        let is_newer = |name: &String| {
            name.split("-step-").nth(1).is_some_and(|step| step.parse::<u64>().unwrap() > reached)
        };
        while !names(folder.path()).iter().any(is_newer) {
            assert!(began.elapsed() < Duration::from_secs(60), "the child saves nothing");
            assert!(child.try_wait().unwrap().is_none(), "the child ended by itself");
            std::thread::sleep(Duration::from_millis(1));
        }
        std::thread::sleep(Duration::from_micros(random.random_range(0..20_000)));
        child.kill().unwrap();
        child.wait().unwrap();
        let found = latest(folder.path()).unwrap().unwrap();
        assert!(found.damaged.is_empty(), "{:?}", found.damaged);
        let step = newest(folder.path()).step();
        assert!(step > reached, "{step} after {reached}");
        reached = step;
    }
}
