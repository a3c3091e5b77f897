"""What is trained, and what it is trained for. Every file here, by what it is about:

the contract        contract, batch, growth, tree, vocabulary, settings, rules
a kind each         eagle3, eagle1, medusa, hydra, mlp
of several files    draft, draft_base, own_target, decoder, lora; mtp, mtp_layer, mtp_shipped, shipped
shared by kinds     layer_head, recycling_head, slot_head, layers
a head on disk      checkpoint, description; to begin with: start, published, published_form, warm_start; engines: export
the frozen target   target, target_facts, target_probe, facts, llama_body, packed, cache, precision, sampling
in parts            sharded_target, target_ends, weight_files
its words           rendering
its folder          builtin, smollm2, tiny, made_targets, model_files
what it said        paths, features
and for all rooms   store, object_store, errors, intervals, memory
"""
